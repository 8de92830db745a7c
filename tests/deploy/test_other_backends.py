"""A backend of another package is deployed too: the values describe its engine by its facts."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dflash_serve.adapter import registry
from dflash_serve.adapter.facts import EngineFacts, Probes
from dflash_serve.adapter.protocol import Command, Launch, PreparedFile
from dflash_serve.checkpoint.config import Heads
from dflash_serve.cli.main import app
from dflash_serve.deployment.description import BACKEND_GROUP, Deployment
from dflash_serve.errors import Problem, UserError
from dflash_torch.facts import FACTS
from tests.support.chart import DIGEST, Manifest, only, render, server, server_pod
from tests.support.tiny_target import write_tiny_pair

PROBES = Probes(started="/up", live="/alive", ready="/deep")
METRICS = replace(FACTS.metrics, path="/figures", queued="acme:waiting")


class AcmeLaunch(Launch):
    """A launch that prepares nothing."""

    @property
    def problems(self) -> list[Problem]:
        return []

    def files(self, folder: Path) -> list[PreparedFile]:
        return []

    def prepare(self, folder: Path) -> None: ...

    def command(self, folder: Path, *, host: str = "127.0.0.1", port: int = 8000) -> Command:
        return Command(("acme-serve", f"--host={host}", f"--port={port}"))


class Acme:
    """A server backend as another package would bring it."""

    name = "acme"
    facts: EngineFacts = replace(
        FACTS,
        title="Acme",
        engine_type="acme-serve",
        probes=PROBES,
        metrics=METRICS,
        environment={"ACME_QUIET": "1"},
        needs_gpu=True,
        server_flags=(),
    )

    releases = "acme-serve 1"
    untried = ()

    def head_problems(self, heads: Heads) -> list[Problem]:
        return []

    def launch(self, deployment: Deployment) -> Launch:
        return AcmeLaunch(deployment=deployment)


acme = Acme()


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed beside ours, and found by its entry point."""
    point = EntryPoint("acme", f"{__name__}:acme", BACKEND_GROUP)
    monkeypatch.setattr(type(point), "load", _load)
    found = EntryPoints([*entry_points(group=BACKEND_GROUP), point])
    monkeypatch.setattr(registry, "entry_points", lambda *, group: found.select(group=group))


def _load(point: EntryPoint, _load: Any = EntryPoint.load) -> Any:
    return acme if point.name == "acme" else _load(point)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deployment")
    target, drafter = write_tiny_pair(folder)
    path = folder / "deployment.yaml"
    path.write_text(yaml.safe_dump({"target": {"model": str(target)}, "drafter": {"model": str(drafter)}}))
    return path


def deploy(file: Path, form: str, name: str = "acme") -> list[Manifest]:
    words = ["deploy", str(file), "--backend", name, "--render", form, "--image", f"x/acme@{DIGEST}"]
    result = CliRunner().invoke(app, words)
    if result.exception is not None:
        raise result.exception
    return list(yaml.safe_load_all(result.stdout))


def test_serve_starts_it(file: Path) -> None:
    result = CliRunner().invoke(app, ["serve", str(file), "--backend", "acme", "--dry-run", "--quiet"])
    assert result.stdout.split() == ["acme-serve", "--host=127.0.0.1", "--port=8000"]


def test_the_chart_runs_it_by_what_the_values_say_of_it(file: Path) -> None:
    (values,) = deploy(file, "helm")
    cluster = {"podMonitor": {"enabled": True}, "networkPolicy": {"namespaces": ["monitoring"]}}
    manifests = render({**values, **cluster, "autoscaling": {"kind": "hpa"}})
    container = server(manifests)
    probes = [container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert probes == ["/up", "/alive", "/deep"]
    assert {"name": "ACME_QUIET", "value": "1"} in container["env"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert not [word for word in container["args"] if "drain" in word]
    assert server_pod(manifests)["metadata"]["labels"]["llm-d.ai/engine-type"] == "acme-serve"
    assert only(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["path"] == "/figures"
    (metric,) = only(manifests, "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "acme:waiting"


def test_an_engine_of_which_we_only_have_facts_is_refused_in_one_line(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Acme, "launch")
    with pytest.raises(
        UserError,
        match=r"^--backend acme: dflash-serve does not start it yet: .*; use another, such as --backend torch$",
    ):
        deploy(file, "helm")


def test_what_a_package_for_another_release_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Acme, "head_problems")
    with pytest.raises(
        UserError, match="another dflash-serve: it lacks head_problems; install a newer release of the package"
    ):
        registry.server_backend("acme")
