"""How long a pod may take to come and to go."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dflash_serve.deploying.workload import DRAIN_SECONDS, GRACE_SECONDS, MARGIN_SECONDS, PRE_STOP_SECONDS
from tests.deploy.test_chart_golden import CASES, case
from tests.support.chart import Manifest, of_kind, only, pods, render, server, server_pod, values

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
    margin = drain.get("marginSeconds", MARGIN_SECONDS)
    assert (stopped, drained) == (drain.get("preStopSeconds", PRE_STOP_SECONDS), drain.get("seconds", DRAIN_SECONDS))
    assert pod["terminationGracePeriodSeconds"] == stopped + drained + margin > stopped + drained


@pytest.mark.parametrize("name", CASES)
def test_every_server_has_the_grace_that_other_renderings_give_it(name: str) -> None:
    servers = [
        pod["spec"] for label, pod in pods(render(case(name))) if label.split()[0] in ("Deployment", "LeaderWorkerSet")
    ]
    assert {spec["terminationGracePeriodSeconds"] for spec in servers} == {GRACE_SECONDS}
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


def test_a_rollout_waits_for_the_build_and_the_load() -> None:
    manifests = render(case("tensorrt-llm-with-a-built-drafter"))
    build = only(manifests, "Job")["spec"]["activeDeadlineSeconds"]
    probe = server(manifests)["startupProbe"]
    load = probe["periodSeconds"] * probe["failureThreshold"]
    assert only(manifests, "Deployment")["spec"]["progressDeadlineSeconds"] > build + load


@pytest.mark.parametrize("name", CASES)
def test_a_busy_server_is_not_a_dead_one(name: str) -> None:
    """Liveness asks the shallow route, and longer than one slow answer."""
    probe = server(render(case(name)))["livenessProbe"]
    assert probe["httpGet"]["path"] == ("/live" if name.startswith("torch") else "/health")
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 60


def test_a_changed_deployment_is_a_new_pod() -> None:
    def stamp(**deployment: Any) -> str:
        annotations: Manifest = server_pod(render(values("sglang", {**QWEN, **deployment})))["metadata"]["annotations"]
        return str(annotations["dflash-serve/config"])

    assert stamp() == stamp()
    assert stamp() != stamp(limits={"max_batch_size": 8})


def build_of(**changes: Any) -> Manifest:
    given = {**case("tensorrt-llm-with-a-built-drafter"), **changes}
    return only(render(given), "Job")


def output_of(job: Manifest) -> str:
    return str(job["spec"]["template"]["spec"]["containers"][0]["args"][-1])


def test_a_build_is_named_by_recipe_tools_and_gpu() -> None:
    given = case("tensorrt-llm-with-a-built-drafter")
    first = build_of()
    comment = {**given["build"], "recipe": "# said otherwise\n" + given["build"]["recipe"]}
    assert output_of(build_of(build=comment)) == output_of(first)
    for changes in (
        {"build": {**given["build"], "recipe": given["build"]["recipe"].replace("[fp8]", "[fp8, nvfp4]")}},
        {"build": {**given["build"], "image": {**given["build"]["image"], "digest": "sha256:" + "f" * 64}}},
        {"placement": {"products": ["NVIDIA-H200"]}},
    ):
        assert output_of(build_of(**changes)) != output_of(first)


def test_a_job_that_would_be_changed_is_another_job_of_the_same_build() -> None:
    """Kubernetes refuses to change a Job; the new one finds its outputs there."""
    first, other = build_of(), build_of(placement={"priorityClassName": "low"})
    assert output_of(first) == output_of(other)
    assert first["metadata"]["name"] != other["metadata"]["name"]
    assert build_of(replicas=1)["metadata"]["name"] == first["metadata"]["name"]


def test_servers_wait_for_the_build_they_are_given_and_hold_it_against_its_manifest() -> None:
    manifests = render(case("tensorrt-llm-with-a-built-drafter"))
    (job,) = of_kind(manifests, "Job")
    spec = server_pod(manifests)["spec"]
    (waits,) = spec["initContainers"]
    assert {"name": "BUILD", "value": output_of(job)} in waits["env"]
    assert 'dflash-serve build /etc/dflash-serve/recipe.yaml --output "$BUILD" --verify' in waits["args"][0]
    (mount,) = [m for m in spec["containers"][0]["volumeMounts"] if m["mountPath"] == "/build"]
    assert mount == {
        **{"name": "models", "mountPath": "/build", "readOnly": True},
        "subPath": output_of(job).removeprefix("/models/"),
    }
