"""Times that a pod has for loading and for ending."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.chart import CASES, CHART, Manifest, case, config, pods, render, server, server_pod, values

QWEN = {"target": {"model": "Qwen/Qwen3-8B"}, "hardware": {"gpu": "b200"}}


def seconds_to_start(**given: Any) -> int:
    deployment = given.pop("deployment", QWEN)
    probe = server(render(values("sglang", deployment, **given)))["startupProbe"]
    return int(probe["periodSeconds"] * probe["failureThreshold"])


@pytest.mark.parametrize("drain", [{}, {"preStopSeconds": 5, "seconds": 600, "marginSeconds": 1}])
def test_the_grace_is_longer_than_pre_stop_and_drain_together(drain: dict[str, int]) -> None:
    pod = server_pod(render(values("torch", {"target": {"model": "smollm2"}}, drain=drain)))["spec"]
    (container,) = pod["containers"]
    (given,) = [word for word in container["args"] if word.startswith("--drain-seconds=")]
    drained = int(given.partition("=")[2])
    stopped = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    margin = drain.get("marginSeconds", 15)
    assert (stopped, drained) == (drain.get("preStopSeconds", 15), drain.get("seconds", 120))
    assert pod["terminationGracePeriodSeconds"] == stopped + drained + margin > stopped + drained


@pytest.mark.parametrize("name", CASES)
def test_every_server_has_the_same_grace(name: str) -> None:
    servers = [
        pod["spec"] for label, pod in pods(render(case(name))) if label.split()[0] in ("Deployment", "LeaderWorkerSet")
    ]
    assert {spec["terminationGracePeriodSeconds"] for spec in servers} == {150}
    assert all(
        spec["containers"][0]["lifecycle"]["preStop"] for spec in servers if "lifecycle" in spec["containers"][0]
    )


def test_a_load_is_given_the_time_its_size_takes() -> None:
    startup = {"baseSeconds": 120, "gigabytes": 16.4, "gigabytesPerSecond": 0.1}
    wanted = 120 + 16.4 / 0.1
    assert wanted <= seconds_to_start(startup=startup) < wanted + 10


def test_without_a_size_it_may_be_as_large_as_the_gpus() -> None:
    eight = {**QWEN, "parallel": {"tensor": 8}, "hardware": {"gpu": "b300", "count": 8}}
    assert seconds_to_start(deployment=eight) >= 300 + math.ceil(8 * 268 / 0.5) > seconds_to_start()


@pytest.mark.parametrize("name", CASES)
def test_a_busy_server_is_not_a_dead_one(name: str) -> None:
    """Liveness asks the shallow route, and longer than one slow answer."""
    probe = server(render(case(name)))["livenessProbe"]
    assert probe["httpGet"]["path"] == ("/live" if name.startswith("torch") else "/health")
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 60


def test_a_changed_deployment_is_a_new_pod_and_a_changed_chart_is_none() -> None:
    def template(**deployment: Any) -> Manifest:
        return server_pod(render(values("sglang", {**given, **deployment})))

    given = {**QWEN, "drafter": {"model": "z-lab/Qwen3-8B-DFlash-b16"}}

    assert template() != template(limits={"max_batch_size": 8})
    of_the_chart = {"helm.sh/chart", "app.kubernetes.io/version"}
    assert not of_the_chart & template()["metadata"]["labels"].keys()
    mounted = render(values("sglang", given, tests={"acceptance": {"atLeast": 2}}))
    assert "acceptance.py" in config(mounted)
    assert server_pod(mounted) == template()  # a file that only tests read restarts no server


@pytest.mark.parametrize("name", CASES)
def test_a_bump_of_the_chart_restarts_no_engine(name: str, tmp_path: Path) -> None:
    """Another version of chart and program, and other scripts of `helm test`: the same pods."""
    bumped = tmp_path / CHART.name
    shutil.copytree(CHART, bumped)
    described = (bumped / "Chart.yaml").read_text()
    (bumped / "Chart.yaml").write_text(re.sub(r"(?m)^(version|appVersion): .*", r"\1: 9.8.7", described))
    for script in ("ask.py", "acceptance.py", "fetch.py"):
        (bumped / "files" / script).write_text("# another\n")
    before, after = render(case(name)), render(case(name), chart=bumped)
    assert "dflash-serve-9.8.7" in {manifest["metadata"]["labels"]["helm.sh/chart"] for manifest in after}
    engines = ("Deployment", "LeaderWorkerSet")
    found = [[m["spec"] for m in manifests if m["kind"] in engines] for manifests in (before, after)]
    assert found[0] == found[1] != []
