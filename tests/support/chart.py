"""The chart through real helms: its manifests, and its refusals."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from dflash_serve.deploying.chart import write_chart

from .helm import HELM_3, HELM_4, Layer, helm

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "dflash-serve"
RECIPES = ROOT / "engines" / "recipes"
INSTALLATIONS = ROOT / "tests" / "deploy" / "installations"
GOLDEN = ROOT / "tests" / "deploy" / "golden"
CASES = sorted(path.stem for path in INSTALLATIONS.glob("*.yaml"))
BACKENDS = ("torch", "sglang", "tensorrt-llm", "vllm")
EVERYTHING = os.environ.get("DFLASH_SERVE_TEST_DEPLOY") == "all"
HELMS = (HELM_3, HELM_4) if EVERYTHING else (HELM_4,)
"""Helms to test with: the newest; with DFLASH_SERVE_TEST_DEPLOY=all the oldest too."""
DIGEST = "sha256:" + "0123456789abcdef" * 4
KUBERNETES = "1.34.0"
"""The cluster's release as helm is told; helm 3 would otherwise take its own, 1.32."""

Manifest = dict[str, Any]

_FOLDER = tempfile.TemporaryDirectory(prefix="chart-")


def check_golden(name: str, found: list[Any]) -> None:
    """These documents are those of the golden file, or become it with GOLDEN=write."""
    file = GOLDEN / f"{name}.yaml"
    if os.environ.get("GOLDEN") == "write":
        file.write_text(yaml.safe_dump_all(found, sort_keys=True, width=130, default_flow_style=None))
    assert found == list(yaml.safe_load_all(file.read_text())), f"{file.name}: GOLDEN=write, and read the difference"


def recipe_deployment(recipe: str) -> Manifest:
    """The `deployment` of a recipe, as its file has it."""
    deployment: Manifest = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())["deployment"]
    return deployment


def case(name: str) -> Manifest:
    """The values of an installation."""
    given: Manifest = yaml.safe_load((INSTALLATIONS / f"{name}.yaml").read_text())
    return given


def changed(name: str, changes: Mapping[str, object]) -> Manifest:
    """The values of an installation, with `a.b: value` set; None removes a key."""
    given = case(name)
    for dotted, value in changes.items():
        *outer, last = dotted.split(".")
        inner = given
        for key in outer:
            inner = inner.setdefault(key, {})
        if value is None:
            inner.pop(last, None)
        else:
            inner[last] = value
    return given


def values(backend: str, deployment: Mapping[str, Any], **more: object) -> Manifest:
    """The fewest that are needed, and more."""
    image = {"repository": f"registry.example/dflash-serve-{backend}", "digest": DIGEST}
    return {"backend": backend, "image": image, "deployment": dict(deployment), **more}


def render(
    given: Mapping[str, Any], layer: Layer = HELM_4, *, kubernetes: str = KUBERNETES, chart: Path | None = None
) -> list[Manifest]:
    """`helm template`, parsed."""
    done = _helm("template", json.dumps(given), layer, kubernetes, chart)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def refusal(
    given: Mapping[str, Any], layer: Layer = HELM_4, *, kubernetes: str = KUBERNETES, chart: Path | None = None
) -> str:
    """helm's message for values that it refuses; empty where it renders them."""
    done = _helm("template", json.dumps(given), layer, kubernetes, chart)
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
def whole_chart() -> Path:
    """The chart with the schema of its values, as it is packaged."""
    return write_chart(Path(_FOLDER.name, "dflash-serve"))


@cache
def _helm(
    verb: str, given: str, layer: Layer, kubernetes: str, chart: Path | None = None
) -> subprocess.CompletedProcess[str]:
    chart = chart or whole_chart()
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
    """Every pod: the name of its object, and its `metadata` and `spec`."""
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
    """The pod with an http server in it."""
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
