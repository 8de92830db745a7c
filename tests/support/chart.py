"""Our chart through real helms: what it renders, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .helm import HELM_3, HELM_4, Layer, helm

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "dflash-serve"
RECIPES = ROOT / "engines" / "recipes"
BACKENDS = ("torch", "sglang", "tensorrt-llm", "vllm")
HELMS = (HELM_3, HELM_4)
DIGEST = "sha256:" + "0123456789abcdef" * 4
KUBERNETES = "1.34.0"
"""What the render is for; helm 3 would otherwise take its own, 1.32."""

Manifest = dict[str, Any]


def recipes() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_deployment(recipe: str) -> Manifest:
    """The `deployment` of a recipe, as its file has it."""
    deployment: Manifest = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())["deployment"]
    return deployment


def impossible(deployment: Mapping[str, Any], backend: str) -> bool:
    """The embedded engine runs on one device, and the chart says so before anything is installed."""
    return backend == "torch" and deployment["hardware"]["count"] > 1


def pairs(*, possible: bool) -> list[tuple[str, str]]:
    """Recipe and backend: those that the chart renders, or those that it refuses."""
    every = [(recipe, backend) for recipe in recipes() for backend in BACKENDS]
    return [pair for pair in every if impossible(recipe_deployment(pair[0]), pair[1]) != possible]


def values(backend: str, deployment: Mapping[str, Any], **more: object) -> Manifest:
    """The fewest that are needed, and more."""
    image = {"repository": f"registry.example/dflash-serve-{backend}", "digest": DIGEST}
    return {"backend": backend, "image": image, "deployment": dict(deployment), **more}


def render(
    given: Mapping[str, Any], layer: Layer = HELM_4, *, kubernetes: str = KUBERNETES, chart: Path = CHART
) -> list[Manifest]:
    """`helm template`, parsed."""
    done = _helm("template", json.dumps(given), layer, kubernetes, chart)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def refusal(given: Mapping[str, Any], layer: Layer = HELM_4, *, kubernetes: str = KUBERNETES) -> str:
    """What helm says on not rendering it; empty where it does."""
    done = _helm("template", json.dumps(given), layer, kubernetes)
    return done.stderr if done.returncode else ""


def lint(given: Mapping[str, Any], layer: Layer) -> str:
    """Its complaints; empty where there are none."""
    done = _helm("lint", json.dumps(given), layer, KUBERNETES)
    return done.stdout + done.stderr if done.returncode else ""


def notes(given: Mapping[str, Any]) -> str:
    """NOTES.txt, as an installation would print it."""
    done = _helm("install", json.dumps(given), HELM_4, KUBERNETES)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:\n")[2]


@cache
def _helm(
    verb: str, given: str, layer: Layer, kubernetes: str, chart: Path = CHART
) -> subprocess.CompletedProcess[str]:
    what: list[str | Path] = ["--strict", chart] if verb == "lint" else ["trial", chart]
    dry = ["--dry-run=client"] if verb == "install" else []
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(given)  # JSON is YAML
        file.flush()
        options = ["--namespace", "serving", "--values", file.name]
        options += [] if verb == "install" else ["--kube-version", kubernetes]
        argv: list[str | Path] = [helm(layer), verb, *what, *options, *dry]
        return subprocess.run(argv, capture_output=True, text=True, check=False)


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def only(manifests: list[Manifest], kind: str) -> Manifest:
    """The one of that kind."""
    (found,) = of_kind(manifests, kind)
    return found


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """What runs: its name, and `metadata` and `spec` of the pod."""
    for manifest in manifests:
        name, spec = f"{manifest['kind']} {manifest['metadata']['name']}", manifest.get("spec", {})
        if manifest["kind"] == "Pod":
            yield name, manifest
        elif manifest["kind"] == "LeaderWorkerSet":
            for role in ("leaderTemplate", "workerTemplate"):
                yield f"{name} {role}", spec["leaderWorkerTemplate"][role]
        elif "template" in spec:
            yield name, spec["template"]


def server_pod(manifests: list[Manifest]) -> Manifest:
    """Of the pods, the one with an http server in it."""
    server = {"app.kubernetes.io/component": "server"}
    (found,) = (pod for _, pod in pods(manifests) if server.items() <= pod["metadata"]["labels"].items())
    return found


def server(manifests: list[Manifest]) -> Manifest:
    """Its container."""
    (container,) = server_pod(manifests)["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def config(manifests: list[Manifest]) -> Mapping[str, str]:
    """Data of the ConfigMap that the server reads."""
    name = next(v["configMap"]["name"] for v in server_pod(manifests)["spec"]["volumes"] if v["name"] == "config")
    (found,) = (m["data"] for m in of_kind(manifests, "ConfigMap") if m["metadata"]["name"] == name)
    assert isinstance(found, dict)
    return found
