"""Values that pass Kubernetes' own objects on: volumes, variables, containers, schedulers and labels."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from dflash_serve.backend import backend as backend_named
from tests.support.chart import (
    BACKENDS,
    Manifest,
    case,
    config,
    of_kind,
    only,
    pods,
    recipe_deployment,
    render,
    server_pod,
    values,
)

CA = {"name": "ca", "configMap": {"name": "private-ca"}}
NODE_IP = {"name": "NODE_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}
FIRST = {"name": "tune", "image": "registry.example/tune@sha256:0", "command": ["tune"]}


def opened(**doors: Any) -> list[Manifest]:
    return render({**case("sglang-on-two-nodes"), **doors})


def test_volumes_variables_and_containers_of_the_users_stand_beside_ours() -> None:
    mount = {"name": "ca", "mountPath": "/etc/ssl/private-ca", "readOnly": True}
    doors = {"extraVolumes": [CA], "extraVolumeMounts": [mount], "env": [NODE_IP], "initContainers": [FIRST]}
    engines = [pod["spec"] for label, pod in pods(opened(**doors)) if label.startswith("LeaderWorkerSet")]
    assert len(engines) == 2
    for spec in engines:
        assert CA in spec["volumes"]
        assert spec["initContainers"][-1] == FIRST
        assert [each["name"] for each in spec["initContainers"]] == ["check-node", "tune"]
        assert mount in spec["containers"][0]["volumeMounts"]
        assert NODE_IP in spec["containers"][0]["env"]


def test_the_nodes_network_is_the_engines_alone_and_names_are_still_found() -> None:
    given = opened(hostNetwork=True, networkPolicy={"enabled": False})
    for label, pod in pods(given):
        engine = label.startswith("LeaderWorkerSet")
        assert pod["spec"].get("hostNetwork", False) == engine
        assert (pod["spec"].get("dnsPolicy") == "ClusterFirstWithHostNet") == engine


def test_another_scheduler_places_servers_and_jobs_and_queues_find_both_labels() -> None:
    given = case("tensorrt-llm-with-a-built-drafter")
    given["placement"] = {"schedulerName": "kai-scheduler"}
    given |= {"labels": {"kueue.x-k8s.io/queue-name": "q"}, "podLabels": {"kai.scheduler/queue": "q"}}
    manifests = render(given)
    for kind in ("Deployment", "Job"):
        assert only(manifests, kind)["spec"]["template"]["spec"]["schedulerName"] == "kai-scheduler"
    assert only(manifests, "Deployment")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert server_pod(manifests)["metadata"]["labels"]["kai.scheduler/queue"] == "q"


def test_an_engines_own_arguments_get_to_it() -> None:
    own = {"sglang": {"stream-interval": 4}}
    given = values("sglang", {**recipe_deployment("qwen3-8b-b200"), "engine_args": own})
    assert yaml.safe_load(config(render(given))["deployment.yaml"])["engine_args"] == own


@pytest.mark.parametrize("name", BACKENDS)
def test_replicas_follow_the_queue_the_batch_and_the_time_between_tokens(name: str) -> None:
    given = values(name, recipe_deployment("qwen3-8b-b200"), podMonitor={"enabled": True})
    given["networkPolicy"] = {"namespaces": ["monitoring"]}
    loads: dict[str, Any] = {"runningPerReplica": 16, "maxReplicas": 8}
    keda = {**loads, "kind": "keda", "interTokenSeconds": 0.02, "prometheusAddress": "http://prometheus:9090"}
    queue, batch, between = [
        (trigger["metricType"], trigger["metadata"]["query"], trigger["metadata"]["threshold"])
        for trigger in only(render({**given, "autoscaling": keda}), "ScaledObject")["spec"]["triggers"]
    ]
    metrics = backend_named(name).facts.metrics
    assert (queue[0], queue[2]) == ("AverageValue", "5")
    assert batch[1].startswith(f"sum({metrics.running}{{")
    assert (batch[0], batch[2]) == ("AverageValue", "16")
    assert between[1].startswith(f"histogram_quantile(0.95, sum by (le) (rate({metrics.inter_token_latency}_bucket{{")
    assert (between[0], between[2]) == ("Value", "0.02")
    hpa = only(render({**given, "autoscaling": {**loads, "kind": "hpa"}}), "HorizontalPodAutoscaler")
    asked = [metric["pods"]["metric"]["name"] for metric in hpa["spec"]["metrics"]]
    assert asked == [metrics.queued, metrics.running]


def test_helm_test_ends_within_helms_five_minutes_beside_a_server_where_the_image_is() -> None:
    for name in ("sglang", "sglang-on-two-nodes", "torch-on-a-cpu"):
        asking = sorted(of_kind(render(case(name)), "Pod"), key=lambda pod: str(pod["metadata"]["name"]))
        assert [pod["metadata"]["name"].rpartition("-")[2] for pod in asking] == ["chat", "stream"]
        for pod in asking:
            assert pod["spec"]["activeDeadlineSeconds"] < 300
            (beside,) = pod["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            assert beside["topologyKey"] == "kubernetes.io/hostname"
            assert beside["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "server"
