"""A pair in one release: both halves, the router that finds them, and what may talk to what."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chart import Manifest, case, changed, check_golden, of_kind, refusal, render

PAIR = "sglang-pair"
ROLE = "llm-d.ai/role"


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return render(case(PAIR))


def named(manifests: list[Manifest], kind: str, name: str) -> Any:
    (found,) = (one for one in of_kind(manifests, kind) if one["metadata"]["name"].endswith(name))
    return found


def container(template: Any) -> Any:
    (found,) = template["spec"]["containers"]
    return found


def test_the_objects_of_a_pair_are_these(manifests: list[Manifest]) -> None:
    """But for the decode half, whose differences from the prefill half the tests below name."""
    own = [one for one in manifests if one["metadata"]["name"].endswith(("-router", "-halves"))]
    check_golden("sglang-pair.manifests", [*own, named(manifests, "Deployment", "-prefill")])


def test_a_half_on_several_nodes_is_a_group_and_the_other_a_deployment(manifests: list[Manifest]) -> None:
    prefill = named(manifests, "Deployment", "-prefill")["spec"]
    decode = named(manifests, "LeaderWorkerSet", "-decode")["spec"]
    group = decode["leaderWorkerTemplate"]
    assert (prefill["replicas"], decode["replicas"], group["size"]) == (2, 1, 2)
    for template, role, memory in (
        (prefill["template"], "prefill", "512Gi"),
        (group["leaderTemplate"], "decode", "812Gi"),
        (group["workerTemplate"], "decode", "812Gi"),
    ):
        server = container(template)
        assert f"--role={role}" in server["args"]
        labels = template["metadata"]["labels"]
        assert (labels[ROLE], labels["llm-d.ai/variant"]) == (role, f"trial-dflash-serve-{role}")
        assert server["resources"]["limits"] == {"memory": memory, "nvidia.com/gpu": "8"}
        annotations = template["metadata"]["annotations"]
        assert ("sglang.ai/bootstrap-port" in annotations) == (role == "prefill")
    assert prefill["selector"]["matchLabels"][ROLE] == "prefill"


def test_probes_ask_no_half_for_an_answer_that_needs_both(manifests: list[Manifest]) -> None:
    """SGLang's /health_generate of a half feigns the other one; our question about acceptance would hang."""
    halves = (
        named(manifests, "Deployment", "-prefill")["spec"]["template"],
        named(manifests, "LeaderWorkerSet", "-decode")["spec"]["leaderWorkerTemplate"]["leaderTemplate"],
    )
    for template in halves:
        assert container(template)["readinessProbe"]["httpGet"]["path"] == "/health_generate"


def test_the_router_finds_the_leaders_of_both_halves(manifests: list[Manifest]) -> None:
    deployment = named(manifests, "Deployment", "-router")["spec"]
    router = container(deployment["template"])
    words = router["args"]
    for role in ("prefill", "decode"):
        at = words.index(f"--{role}-selector")
        selector = dict(word.split("=") for word in words[at + 1 : at + 5])
        labels = {
            "app.kubernetes.io/name": "dflash-serve",
            "app.kubernetes.io/instance": "trial",
            "app.kubernetes.io/component": "server",
            ROLE: role,
        }
        assert selector == labels
    assert words[-1] == "--decode-policy=power_of_two"
    assert router["image"].startswith("registry.example/sglang-router@sha256:")
    assert deployment["template"]["spec"]["automountServiceAccountToken"] is True
    (rule,) = named(manifests, "Role", "-router")["rules"]
    assert rule == {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    (service,) = of_kind(manifests, "Service")
    assert service["spec"]["selector"]["app.kubernetes.io/component"] == "router"


def test_the_halves_reach_each_other_and_the_router_reaches_them(manifests: list[Manifest]) -> None:
    halves = named(manifests, "NetworkPolicy", "-halves")["spec"]
    (between,) = halves["podSelector"]["matchExpressions"]
    assert between == {"key": ROLE, "operator": "In", "values": ["prefill", "decode"]}
    assert halves["ingress"] == [{"from": [{"podSelector": halves["podSelector"]}]}]
    assert halves["egress"] == [{"to": [{"podSelector": halves["podSelector"]}]}]
    to_halves, to_kubernetes = named(manifests, "NetworkPolicy", "-router")["spec"]["egress"]
    assert to_halves["ports"] == [{"port": 8000, "protocol": "TCP"}]
    assert [entry["port"] for entry in to_kubernetes["ports"]] == [443, 6443]
    assert not [one for one in of_kind(manifests, "NetworkPolicy") if "-group-" in one["metadata"]["name"]]


REFUSED: list[tuple[dict[str, object], str]] = [
    (
        {"backend": "vllm"},
        "deployment.pair: the chart routes pairs of sglang, not of vllm; use dflash-serve deploy",
    ),
    ({"deployment.pair.decode": {"gpus": 16, "nodes": 3}}, "deployment.pair.decode: 16 devices do not spread"),
    ({"deployment.role": "decode"}, "deployment.role: decode is one half of a pair; give both"),
    ({"replicas": 2}, "replicas: each half of a pair has its own"),
    (
        {"autoscaling": {"kind": "keda", "prometheusAddress": "http://p:9090"}, "podMonitor": {"enabled": True}},
        "autoscaling.kind: the halves of a pair have fixed numbers",
    ),
    ({"certify.enabled": True}, "certify.enabled: it starts servers of its own"),
    ({"inferencePool": {"enabled": True, "endpointPicker": "x"}}, "inferencePool.enabled: SGLang's router chooses"),
    ({"secrets.apiKeys.name": "keys"}, "secrets.apiKeys.name: SGLang's router takes a key on its command line"),
]


@pytest.mark.parametrize(("changes", "line"), REFUSED, ids=[line[:60] for _, line in REFUSED])
def test_what_a_pair_cannot_have_is_refused(changes: dict[str, object], line: str) -> None:
    assert line in refusal(changed(PAIR, changes))
