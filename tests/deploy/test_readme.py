"""deploy/README.md: its commands are run here, or say in so many words what they need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_serve.adapter.registry import backend
from tests.support.chart import HELMS
from tests.support.helm import Layer, helm
from tests.support.offline_hub import offline_hub

ROOT = Path(__file__).parents[2]
README = ROOT / "deploy" / "README.md"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and what follows it, and its lines."""

    info: str
    text: str

    @property
    def needs(self) -> str | None:
        """None = it runs here."""
        found = re.match(r"# needs (.+)", self.text)
        return found[1] if found else None

    @property
    def commands(self) -> list[str]:
        joined = self.text.replace("\\\n", " ")
        return [line.removeprefix("$ ") for line in joined.splitlines() if line.startswith("$ ")]


BLOCKS = [Block(*found) for found in re.findall(r"^```(.+?)\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)]
RUN = [
    command.replace("helm install", "helm template")  # the same objects, without a cluster
    for block in BLOCKS
    if block.info == "console"
    for command in block.commands
    if block.needs is None or re.match("helm install .+ build/dflash-serve", command)
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which any process finds the hub's models, offline."""
    folder = tmp_path_factory.mktemp("hub")
    with pytest.MonkeyPatch.context() as patch:
        offline_hub(folder, patch)
    return {"HF_HUB_CACHE": str(folder), "HF_HUB_OFFLINE": "1"}


def needs_helm(command: str) -> bool:
    return command.startswith("helm ") or "--render manifests" in command


def run(commands: list[str], folder: Path, environment: dict[str, str]) -> None:
    """In this order; what each prints is kept under its place on the page."""
    for command in commands:
        done = subprocess.run(
            ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        (folder / f"{RUN.index(command)}.out").write_text(done.stdout)


@pytest.fixture(scope="module")
def prepared(hub: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the repository, with the page's files, after its commands that no helm is needed for."""
    folder: Path = tmp_path_factory.mktemp("prepared")
    for name in ("deploy", "engines"):
        (folder / name).symlink_to(ROOT / name)
    for block in BLOCKS:
        if block.info != "console":
            (folder / block.info.partition("file=")[2]).write_text(block.text)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run([command for command in RUN if not needs_helm(command)], folder, {**os.environ, **hub, "PATH": path})
    return folder


@pytest.fixture(scope="module", params=HELMS, ids=lambda layer: layer.helm)
def place(
    request: pytest.FixtureRequest, prepared: Path, hub: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """That folder after all of the page's commands; its helm commands read what the others have written."""
    layer: Layer = request.param
    folder: Path = tmp_path_factory.mktemp("place") / "root"
    shutil.copytree(prepared, folder, symlinks=True)
    path = f"{helm(layer).parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run([command for command in RUN if needs_helm(command)], folder, {**os.environ, **hub, "PATH": path})
    return folder


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def test_what_would_be_applied_serves_what_the_page_says(place: Path) -> None:
    """The drafter as it was published; quantised by a Job for those who ask for it."""
    plain, quantised, *_ = [
        documents((place / f"{i}.out").read_text())
        for i, command in enumerate(RUN)
        if command.startswith("helm template")
    ]
    kinds = {document["kind"] for document in plain}
    assert {"Deployment", "Job", "Service", "PodMonitor", "PrometheusRule", "NetworkPolicy"} <= kinds
    names = {document["metadata"]["name"] for document in plain}
    assert {"gpt-oss-dflash-serve", "gpt-oss-dflash-serve-download"} <= names  # the page's later commands name them
    claim = yaml.safe_load((place / "claim.yaml").read_text())["metadata"]["name"]
    (server,) = [document for document in plain if document["kind"] == "Deployment"]
    volumes = server["spec"]["template"]["spec"]["volumes"]
    assert [v["persistentVolumeClaim"] for v in volumes if "persistentVolumeClaim" in v] == [{"claimName": claim}]
    assert served(plain)["drafter"] == {"model": "z-lab/gpt-oss-120b-DFlash"}
    assert "gpt-oss-dflash-serve-build" in {document["metadata"]["name"] for document in quantised}
    assert served(quantised)["drafter"] == {"model": "/build/drafter-fp8", "quantization": "fp8"}


def served(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The deployment that the pods read."""
    maps = [document["data"] for document in found if document["kind"] == "ConfigMap"]
    read: dict[str, Any] = yaml.safe_load(next(d["deployment.yaml"] for d in maps if "deployment.yaml" in d))
    return read


def test_routers_find_the_charts_pods(place: Path) -> None:
    (server,) = [d for d in documents((place / "manifests.yaml").read_text()) if d["kind"] == "Deployment"]
    labels = server["spec"]["template"]["metadata"]["labels"]
    asked = re.search(r"--service-discovery-port (\d+) --selector ([^`]+)`", README.read_text())
    assert asked is not None
    assert int(asked[1]) == 8000
    assert dict(word.split("=") for word in asked[2].split()).items() <= labels.items()


def test_llm_d_is_told_the_names_that_the_embedded_engine_has(place: Path) -> None:
    told = yaml.safe_load((place / "dflash-engine.yaml").read_text())
    facts = backend("torch").facts
    assert told == {
        "name": facts.engine_type,
        "queuedRequestsSpec": facts.metrics.queued,
        "runningRequestsSpec": facts.metrics.running,
        "kvUsageSpec": facts.metrics.kv_cache_usage,
    }
