"""Volumes have bounds, no secret stands in a manifest, only the server's port is open; checkov judges containers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.chart import CASES, Manifest, case, of_kind, pods, render

RESTRICTED_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"),
}
"""Volumes that Kubernetes' Pod Security Standard `restricted` allows."""

ANYBODY: Manifest = {}
"""The peer of a rule that names none."""

EACH = pytest.mark.parametrize("name", CASES)


def containers(spec: Manifest) -> list[Manifest]:
    return [*spec.get("initContainers", []), *spec["containers"]]


@EACH
def test_all_that_is_written_has_a_volume_with_a_bound(name: str) -> None:
    for label, pod in pods(render(case(name))):
        kinds = {kind for volume in pod["spec"]["volumes"] for kind in volume if kind != "name"}
        asked_for = {"sglang-from-a-model-image": {"image"}, "sglang-in-one-nvlink-domain": {"hostPath"}}
        assert kinds <= RESTRICTED_VOLUMES | asked_for.get(name, set()), label
        for volume in pod["spec"]["volumes"]:
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""}), f"{label}: {volume}"
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        for container in containers(pod["spec"]):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes, label


@EACH
def test_no_secret_stands_in_a_manifest(name: str) -> None:
    manifests = render(case(name))
    assert of_kind(manifests, "Secret") == []
    for label, pod in pods(manifests):
        written = [entry for c in containers(pod["spec"]) for entry in c.get("env", []) if "value" in entry]
        assert not [entry for entry in written if re.search(r"(^|_)TOKEN$", entry["name"])], label
        for volume in pod["spec"]["volumes"]:
            assert volume.get("secret", {}).get("defaultMode", 0o440) == 0o440, label


def selects(selector: Manifest, labels: Manifest) -> bool:
    """True if a label selector, in the two forms that the chart uses, selects a pod."""
    for expression in selector.get("matchExpressions", []):
        inside = labels.get(expression["key"]) in expression["values"]
        if inside != (expression["operator"] == "In"):
            return False
    wanted: dict[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()


def policies(manifests: list[Manifest], labels: Manifest) -> list[Manifest]:
    found = [manifest["spec"] for manifest in of_kind(manifests, "NetworkPolicy")]
    return [spec for spec in found if selects(spec["podSelector"], labels)]


def open_ports(
    manifests: list[Manifest], labels: Manifest, *, of: Manifest | None, namespace: str = "serving"
) -> set[Any]:
    """Ports of a pod that one with labels `of` in `namespace` reaches; `all` where a rule names none."""
    reached: set[Any] = set()
    for spec in policies(manifests, labels):
        for rule in spec.get("ingress", []):
            for peer in rule.get("from", [ANYBODY]):
                if _is(peer, of or {}, namespace):
                    reached |= {entry["port"] for entry in rule.get("ports", [{"port": "all"}])}
    return reached


def _is(peer: Manifest, labels: Manifest, namespace: str) -> bool:
    if peer is ANYBODY:
        return True
    if "namespaceSelector" in peer:
        return selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": namespace})
    return namespace == "serving" and selects(peer["podSelector"], labels)


@EACH
def test_everything_is_denied_but_tests_and_http_from_where_it_is_allowed(name: str) -> None:
    manifests = render(case(name))
    for label, pod in pods(manifests):
        denied = any(
            spec.get("ingress") == [] and "Egress" in spec["policyTypes"]
            for spec in policies(manifests, pod["metadata"]["labels"])
        )
        assert denied == (not label.startswith("Pod ")), label
    server = {"app.kubernetes.io/name": "dflash-serve", "app.kubernetes.io/instance": "trial"}
    server["app.kubernetes.io/component"] = "server"
    assert open_ports(manifests, server, of={}) == {8000}
    # A client of a load balancer is in no namespace; the chart asks for keys there.
    outside = set() if case(name).get("service", {}).get("type", "ClusterIP") == "ClusterIP" else {8000}
    assert open_ports(manifests, server, of={}, namespace="stranger") == outside
    for allowed in case(name).get("networkPolicy", {}).get("namespaces", []):
        assert open_ports(manifests, server, of={}, namespace=allowed) == {8000}
    for other in ("build", "worker"):
        assert open_ports(manifests, {**server, "app.kubernetes.io/component": other}, of={}) == set()


def test_nodes_of_a_replica_reach_each_other_and_no_other_replica() -> None:
    manifests = render(case("sglang-on-two-nodes"))
    label = "leaderworkerset.sigs.k8s.io/group-index"
    (leader, worker) = [pod["metadata"]["labels"] for name, pod in pods(manifests) if "LeaderWorkerSet" in name]
    first, second = {**leader, label: "0"}, {**worker, label: "1"}
    assert "all" in open_ports(manifests, {**worker, label: "0"}, of=first)
    assert "all" in open_ports(manifests, first, of={**worker, label: "0"})
    assert open_ports(manifests, second, of=first) == set()
    assert open_ports(manifests, first, of=second) == {8000}


def test_there_is_a_policy_for_every_replica_there_may_be() -> None:
    given = case("sglang-on-two-nodes-alone")
    given["rollout"] = {"maxSurge": 2}
    names = [m["metadata"]["name"] for m in of_kind(render(given), "NetworkPolicy")]
    assert sum("-group-" in name for name in names) == given["autoscaling"]["maxReplicas"] + 2


def test_the_service_and_prometheus_take_leaders_only() -> None:
    for name in CASES:
        manifests = render(case(name))
        for manifest in of_kind(manifests, "Service") + of_kind(manifests, "PodMonitor"):
            selector = manifest["spec"]["selector"]
            wanted = selector.get("matchLabels", selector)
            taken = [label for label, pod in pods(manifests) if wanted.items() <= pod["metadata"]["labels"].items()]
            assert len(taken) == 1, (name, taken)
            assert taken[0].startswith(("Deployment", "LeaderWorkerSet"))
            assert "workerTemplate" not in taken[0]
