"""A cluster in miniature: nodes with GPUs, CPUs and memory, and an installation played in Helm's order, hooks first.

A pod is placed whole or not at all, holds what it was given until it ends, and runs its init containers first. What is
in them is not run: a build and a download write their folder, a check of the build looks for it, a server is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.support.chart import Manifest

ORDER: tuple[str, ...] = (
    "NetworkPolicy",
    "PodDisruptionBudget",
    "ServiceAccount",
    "ConfigMap",
    "PersistentVolumeClaim",
    "Service",
)
ORDER += ("Pod", "Deployment", "HorizontalPodAutoscaler", "StatefulSet", "Job", "CronJob")
"""Helm's InstallOrder, of the kinds that we have; custom resources come last."""
UNITS = {"m": 1e-3, "": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
DGX = {"nvidia.com/gpu": 8.0, "cpu": 224.0, "memory": 2.0 * 2**40, "ephemeral-storage": 25.0 * 2**40}


class StuckError(Exception):
    """Nothing moves any more, and not all is there."""


def quantity(text: str | int) -> float:
    """Kubernetes' quantity as a number."""
    digits = str(text).rstrip("mKMGTi")
    return float(digits) * UNITS[str(text)[len(digits) :]]


def asked(pod: Manifest) -> dict[str, float]:
    """What a pod asks for: of its containers together, or of its largest init container. Limits stand for GPUs."""

    def of(container: Manifest) -> dict[str, float]:
        resources = container.get("resources", {})
        amounts = {**resources.get("limits", {}), **resources.get("requests", {})}
        return {name: quantity(amount) for name, amount in amounts.items()}

    every = [of(container) for container in pod["containers"]]
    first = [of(container) for container in pod.get("initContainers", [])]
    names = {name for each in (*every, *first) for name in each}
    return {name: max(sum(e.get(name, 0) for e in every), *(f.get(name, 0) for f in first), 0) for name in names}


@dataclass
class Cluster:
    """One node, its pods, and what lies on the claims."""

    free: dict[str, float] = field(default_factory=lambda: dict(DGX))
    claims: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    """Written by Jobs."""
    events: list[str] = field(default_factory=list)
    pending: list[tuple[str, Manifest]] = field(default_factory=list)
    running: list[tuple[str, Manifest]] = field(default_factory=list)

    def install(self, manifests: list[Manifest]) -> None:
        """What `helm install --wait` does.

        Raises:
            StuckError: it would wait for ever.
        """
        hooks = [m for m in manifests if "pre-install" in _annotation(m, "helm.sh/hook")]
        tests = [m for m in manifests if _annotation(m, "helm.sh/hook") == "test"]
        for manifest in sorted(hooks, key=lambda m: int(_annotation(m, "helm.sh/hook-weight") or 0)):
            self._create(manifest)
            self._settle()
        rest = [m for m in manifests if m not in hooks and m not in tests]
        for manifest in sorted(rest, key=lambda m: ORDER.index(m["kind"]) if m["kind"] in ORDER else len(ORDER)):
            self._create(manifest)
        self._settle()

    def _create(self, manifest: Manifest) -> None:
        name = manifest["metadata"]["name"]
        if manifest["kind"] == "PersistentVolumeClaim":
            self.claims.add(name)
        if manifest["kind"] in ("Deployment", "Job"):
            self.pending.append((f"{manifest['kind']} {name}", manifest["spec"]["template"]["spec"]))

    def _settle(self) -> None:
        """Until every pod has ended or is ready."""
        while self.pending or self._waiting():
            if not any([*self._place(), *self._advance()]):
                waits = [name for name, _ in (*self.pending, *self._waiting())]
                raise StuckError(f"{', '.join(waits)} wait for ever; free: {self.free['nvidia.com/gpu']:.0f} GPUs")

    def _place(self) -> Iterator[bool]:
        for name, pod in list(self.pending):
            wants = asked(pod)
            bound = {v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
            if bound <= self.claims and all(self.free[key] >= amount for key, amount in wants.items()):
                self._take(wants, -1)
                self.pending.remove((name, pod))
                self.running.append((name, pod))
                self.events.append(f"{name} runs")
                yield True

    def _advance(self) -> Iterator[bool]:
        for name, pod in self._waiting():
            if name.startswith("Job "):
                self.folders |= {word for word in pod["containers"][0]["command"] if word.startswith("/models/builds/")}
                self.running.remove((name, pod))
                self._take(asked(pod), 1)
                self.events.append(f"{name} is done")
                yield True
            elif all(word in self.folders for word in _built(pod)):
                self.events.append(f"{name} is ready")
                yield True

    def _waiting(self) -> list[tuple[str, Manifest]]:
        return [(name, pod) for name, pod in self.running if f"{name} is ready" not in self.events]

    def _take(self, amounts: dict[str, float], sign: int) -> None:
        for name, amount in amounts.items():
            self.free[name] += sign * amount


def _built(pod: Manifest) -> list[str]:
    """Folders that init containers check, and go on trying until they are there."""
    words = [
        word for container in pod.get("initContainers", []) for word in (*container["command"], *container["args"])
    ]
    return [word for word in words if word.startswith("/models/builds/")]


def _annotation(manifest: Manifest, name: str) -> str:
    return str((manifest["metadata"].get("annotations") or {}).get(name, ""))


def without_hooks(manifests: list[Manifest]) -> list[Manifest]:
    """The same objects as they were before Jobs were hooks: all created at once, the servers waiting in their pods."""

    def plain(manifest: Manifest) -> Manifest:
        kept = {
            k: v for k, v in (manifest["metadata"].get("annotations") or {}).items() if not k.startswith("helm.sh/")
        }
        return {**manifest, "metadata": {**manifest["metadata"], "annotations": kept}}

    is_test: Callable[[Manifest], bool] = lambda m: _annotation(m, "helm.sh/hook") == "test"  # noqa: E731
    return [manifest if is_test(manifest) else plain(manifest) for manifest in manifests]
