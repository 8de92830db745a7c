"""The chart and what we render without it are one: same command, environment, probes, mounts and end of a server."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dflash_serve.backend import backend
from dflash_serve.cli.main import app
from dflash_serve.deploying.chart import KNOWN as BACKENDS
from dflash_serve.deploying.chart import template
from dflash_serve.deploying.pod import container_security, pod, pod_security
from dflash_serve.deploying.workload import DRAIN_SECONDS, GRACE_SECONDS, Workload
from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError
from tests.support.helm import HELM_4, helm
from tests.support.tiny_target import write_tiny_pair

DIGEST = f"sha256:{64 * '0'}"


@pytest.fixture(autouse=True)
def with_helm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{helm(HELM_4).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deployment")
    target, drafter = write_tiny_pair(folder)
    path = folder / "deployment.yaml"
    path.write_text(yaml.safe_dump({"target": {"model": str(target)}, "drafter": {"model": str(drafter)}}))
    return path


def workload(file: Path, name: str) -> Workload:
    return Workload("release", name, Deployment.model_validate(yaml.safe_load(file.read_text())), f"x/y@{DIGEST}")


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def deploy(file: Path, *words: str) -> str:
    result = CliRunner().invoke(app, ["deploy", str(file), "--image", f"x/y@{DIGEST}", *words])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def charts_pod(file: Path, name: str, **values: Any) -> dict[str, Any]:
    deployment = yaml.safe_load(file.read_text())
    given = {"backend": name, "deployment": deployment, "image": {"repository": "x/y", "digest": DIGEST}, **values}
    found = [d for d in documents(template("release", given)) if d["kind"] == "Deployment"]
    spec: dict[str, Any] = found[0]["spec"]["template"]
    return spec


EACH = pytest.mark.parametrize("name", BACKENDS)


@EACH
def test_command_and_environment_are_the_charts(file: Path, name: str) -> None:
    server = charts_pod(file, name)["spec"]["containers"][0]
    assert tuple(server["command"] + server["args"]) == workload(file, name).command
    environment = {variable["name"]: variable["value"] for variable in server["env"]}
    assert environment == workload(file, name).environment


@EACH
def test_probes_and_end_are_the_charts(file: Path, name: str) -> None:
    gigabytes = 40
    spec = charts_pod(file, name, startup={"gigabytes": gigabytes}, readiness={"acceptance": False})["spec"]
    ours: Any = pod(workload(file, name), "server")
    theirs, mine = spec["containers"][0], ours["containers"][0]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert theirs[probe]["httpGet"]["path"] == mine[probe]["httpGet"]["path"]
        assert theirs[probe]["timeoutSeconds"] == mine[probe]["timeoutSeconds"]
    assert theirs["lifecycle"] == mine["lifecycle"]
    assert spec["terminationGracePeriodSeconds"] == ours["terminationGracePeriodSeconds"] == GRACE_SECONDS
    assert DRAIN_SECONDS + mine["lifecycle"]["preStop"]["sleep"]["seconds"] < GRACE_SECONDS


def test_a_load_may_take_as_long_as_in_the_chart(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workload, "gigabytes", 40)
    theirs = charts_pod(file, "sglang", startup={"gigabytes": 40})["spec"]["containers"][0]["startupProbe"]
    seconds = theirs["failureThreshold"] * theirs["periodSeconds"]
    assert seconds == math.ceil(workload(file, "sglang").startup_seconds / 10) * 10


@EACH
def test_rights_and_mounts_are_the_charts(file: Path, name: str) -> None:
    spec = charts_pod(file, name)["spec"]
    assert spec["securityContext"] == pod_security()
    assert spec["containers"][0]["securityContext"] == container_security()
    ours: Any = pod(workload(file, name), "server")
    mine = {mount["mountPath"] for mount in ours["containers"][0]["volumeMounts"]} - {"/etc/dflash-serve-hub"}
    assert {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]} == mine


@EACH
def test_metrics_are_scraped_and_scaled_by_as_the_chart_does(file: Path, name: str) -> None:
    deployment = yaml.safe_load(file.read_text())
    given = {
        "backend": name,
        "deployment": deployment,
        "image": {"repository": "x/y", "digest": DIGEST},
        "podMonitor": {"enabled": True},
        "networkPolicy": {"namespaces": ["monitoring"]},
        "autoscaling": {"kind": "hpa"},
    }
    rendered = documents(template("release", given))
    by_kind: dict[str, Any] = {document["kind"]: document.get("spec") for document in rendered}
    assert by_kind["PodMonitor"]["podMetricsEndpoints"][0]["path"] == backend(name).facts.metrics.path
    assert (
        by_kind["HorizontalPodAutoscaler"]["metrics"][0]["pods"]["metric"]["name"] == backend(name).facts.metrics.queued
    )


@EACH
def test_values_become_manifests(file: Path, name: str, tmp_path: Path) -> None:
    """`--render manifests` is helm's answer to `--render helm`, with the labels that routers look for."""
    assert isinstance(yaml.safe_load(deploy(file, "--render", "helm", "--backend", name)), dict)
    deploy(file, "--render", "manifests", "--backend", name, "--name", "mine", "--output", str(tmp_path / "all.yaml"))
    (server,) = [d for d in documents((tmp_path / "all.yaml").read_text()) if d["kind"] == "Deployment"]
    labels = server["spec"]["template"]["metadata"]["labels"]
    assert labels["llm-d.ai/engine-type"] == backend(name).facts.engine_type
    assert labels["app.kubernetes.io/instance"] == "mine"
    assert not [*tmp_path.glob(".*")]


def test_without_helm_one_line_says_what_to_do(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"helm is not installed.*--render helm"):
        deploy(file, "--render", "manifests", "--backend", "sglang")


def test_what_helm_refuses_is_one_line(file: Path) -> None:
    with pytest.raises(UserError, match="image") as refused:
        CliRunner().invoke(
            app, ["deploy", str(file), "--render", "manifests", "--backend", "sglang"], catch_exceptions=False
        )
    assert "\n" not in str(refused.value)
