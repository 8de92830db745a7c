"""The chart refuses values before anything is installed: by its schema, or in a line: where, problem, remedy."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.chart import CASES, CHART, HELMS, case, changed, refusal

Changes = dict[str, Any]
DGX, BUILT, TWO, IMAGE, DOMAIN = (
    "tensorrt-llm-on-a-dgx",
    "tensorrt-llm-with-a-built-drafter",
    "sglang-on-two-nodes",
    "sglang-from-a-model-image",
    "sglang-in-one-nvlink-domain",
)
REFUSED: list[tuple[str, Changes, str]] = [
    # an installation, what is changed in it, the beginning of the line
    ("sglang", {"backend": "acme"}, 'backend: the chart does not know "acme"; give its `engine`'),
    (BUILT, {"build.image.digest": ""}, "build.image: no image"),
    (IMAGE, {"models.image": ""}, "models.image: kind is image, but none is named"),
    ("sglang", {"models.kind": "claim"}, 'models.claim: "" and kind claim do not go together'),
    ("sglang", {"models.claim": "weights"}, 'models.claim: "weights" and kind emptyDir do not go together'),
    ("sglang", {"models.kind": "node"}, 'models.path: "" and kind node do not go together'),
    (DGX, {"models.accessMode": "ReadWriteOnce"}, "models.accessMode: ReadWriteOnce serves one node, .* 8 pods"),
    (TWO, {"models.accessMode": "ReadWriteOnce", "replicas": 1}, "models.accessMode: ReadWriteOnce .* 2 pods"),
    ("sglang", {"cache.path": "/raid/cache"}, 'cache.path: "/raid/cache" and kind emptyDir do not go together'),
    ("sglang", {"cache.kind": "models"}, "cache.kind: models of kind emptyDir keep nothing"),
    (
        DOMAIN,
        {"models": {"kind": "volume", "download": {"enabled": True}}},
        "models.download: the Job runs before the release exists, and models.kind volume comes with it",
    ),
    (BUILT, {"models": {"kind": "volume"}}, "build.enabled: the build writes before the release exists"),
    (BUILT, {"models.accessMode": "ReadWriteOnce"}, "build.enabled: the build writes .* and while servers read"),
    (BUILT, {"build.recipe": "a: b: c"}, "build.recipe: not a recipe"),
    (BUILT, {"build.recipe": "target: {model: x}"}, "build.recipe: not a recipe"),
    (BUILT, {"build.enabled": False}, "deployment.drafter.model: below /build, but nothing is built"),
    (TWO, {"backend": "tensorrt-llm"}, "deployment.parallel.nodes: the chart starts tensorrt-llm on one node, not 2"),
    (TWO, {"deployment.parallel.nodes": 3}, "deployment.parallel.nodes: 16 devices do not spread evenly over 3"),
    ("sglang", {"deployment.role": "prefill"}, "deployment.role: prefill is one half of a pair"),
    (DOMAIN, {"replicas": 2}, "placement.computeDomain: a domain belongs to one replica"),
    (DGX, {"autoscaling.maxReplicas": 1}, "autoscaling.maxReplicas: 1 is less than minReplicas 2"),
    (DGX, {"podMonitor.enabled": False}, "autoscaling.kind: keda reads the queue from Prometheus"),
    (DGX, {"podMonitor.enabled": False}, "alerts.enabled: the alerts read metrics that are not scraped"),
    (DGX, {"autoscaling.kind": "hpa"}, "autoscaling.prometheusAddress: .* and kind hpa do not go together"),
    (
        "sglang-on-two-nodes-alone",
        {"autoscaling.interTokenSeconds": 0.1},
        "autoscaling.interTokenSeconds: needs kind keda",
    ),
    (DGX, {"secrets.apiKeys.name": "clients"}, "secrets.apiKeys.name: tensorrt-llm has no API keys"),
    ("sglang", {"service.type": "LoadBalancer"}, "service.type: LoadBalancer opens a server without keys"),
    ("sglang", {"hostNetwork": True}, "hostNetwork: the network policy does not apply to it"),
    (DGX, {"networkPolicy.namespaces": []}, "podMonitor.enabled: Prometheus comes from another namespace"),
    ("sglang", {"inferencePool.enabled": True}, "inferencePool.endpointPicker: none"),
    ("sglang", {"route.enabled": True}, "route.gateway: none"),
    ("sglang", {"route.canary.service": "trial-dflash-serve"}, "route.canary.service: .* of this release"),
    ("sglang", {"env": [{"name": "DFLASH_SERVE_X", "value": "off"}]}, "env: DFLASH_SERVE_X is set by the chart or by"),
    ("sglang", {"env": [{"name": "LWS_GROUP_SIZE", "value": "1"}]}, "env: LWS_GROUP_SIZE is set by the chart"),
    ("sglang", {"env": [{"name": "HF_TOKEN", "value": "x"}]}, "env: HF_TOKEN is a secret"),
    ("sglang", {"env": [{"name": "TOKEN", "value": "hf_abcdefgh"}]}, "env: TOKEN is a secret"),
    ("sglang", {"podLabels": {"app.kubernetes.io/component": "x"}}, "podLabels: .* selects the pods of the Service"),
    (DGX, {"tests.acceptance.atLeast": 2}, "tests.acceptance.atLeast: needs one replica"),
    ("sglang", {"tests.verify": {"enabled": True}}, "tests.verify.without: none"),
]
OF_OLD_KUBERNETES = [
    (IMAGE, "1.32.0", "models.kind: image volumes need Kubernetes 1.33"),
    (TWO, "1.30.0", "placement.topology.key: needs Kubernetes 1.31"),
    (DOMAIN, "1.30.0", "placement.computeDomain: .* needs Kubernetes 1.32"),
]
NOT_IN_THE_SCHEMA: list[tuple[str, Changes]] = [
    ("image.repository", {"image.repository": ""}),
    ("image.repository", {"image.repository": "registry.example:5000/engine:latest"}),
    ("image.repository", {"image.repository": "registry.example/engine@sha256:0123"}),
    ("image.digest", {"image.digest": "latest"}),
    ("image.digest", {"image.digest": "sha256:0123"}),
    ("image.pullPolicy", {"image.pullPolicy": "Sometimes"}),
    ("build.image.digest", {"build.image.digest": "sha256:0123"}),
    ("build.gpus", {"build.gpus": -1}),
    ("build.memory", {"build.memory": "0"}),
    ("build.deadlineSeconds", {"build.deadlineSeconds": 1}),
    ("models.size", {"models.size": "much"}),
    ("models.kind", {"models.kind": "hostPath"}),
    ("models.image", {"models.image": "registry.example/weights:1"}),
    ("models.encodings", {"models.encodings": "/data"}),
    ("models.download.deadlineSeconds", {"models.download.deadlineSeconds": 5}),
    ("resources.memory", {"resources.memory": "64 GB"}),
    ("resources.cpu", {"resources.cpu": "many"}),
    ("sharedMemory", {"sharedMemory": "16GiB"}),
    ("scratch", {"scratch": ""}),
    ("placement.computeCapability", {"placement.computeCapability": "blackwell"}),
    ("replicas", {"replicas": 0}),
    ("replicas", {"replicas": "two"}),
    ("autoscaling.minReplicas", {"autoscaling.minReplicas": 0}),
    ("autoscaling.queuedPerReplica", {"autoscaling.queuedPerReplica": 0}),
    ("autoscaling.runningPerReplica", {"autoscaling.runningPerReplica": -1}),
    ("autoscaling.scaleDownSeconds", {"autoscaling.scaleDownSeconds": -1}),
    ("autoscaling.prometheusAddress", {"autoscaling.prometheusAddress": "prometheus:9090"}),
    ("autoscaling.kind", {"autoscaling.kind": "both"}),
    ("disruption.maxUnavailable", {"disruption.maxUnavailable": 0}),
    ("drain.preStopSeconds", {"drain.preStopSeconds": 0}),
    ("drain.seconds", {"drain.seconds": -5}),
    ("startup.gigabytesPerSecond", {"startup.gigabytesPerSecond": 0}),
    ("startup.gigabytes", {"startup.gigabytes": 0}),
    ("startup.baseSeconds", {"startup.baseSeconds": 5}),
    ("networkPolicy.egressPorts.0", {"networkPolicy.egressPorts": [0]}),
    ("service.port", {"service.port": 70000}),
    ("service.type", {"service.type": "ExternalName"}),
    ("secrets.huggingFaceToken.key", {"secrets.huggingFaceToken.key": ""}),
    ("user", {"user": 0}),
    ("fullnameOverride", {"fullnameOverride": "Qwen"}),
    ("tests.verify.without", {"tests.verify": {"enabled": True, "without": "plain"}}),
    ("env.0", {"env": [{"name": "A"}]}),
    ("env.0", {"env": [{"value": "A"}]}),
    ("env.0.valueFrom", {"env": [{"name": "A", "valueFrom": {}}]}),
    ("env.0.valueFrom", {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "x"}}}]}),
    ("engine.probes", {"engine": {"probes": {}}}),
    ("deployment.hardware.gpu", {"deployment.hardware.gpu": "b100"}),
    ("deployment.speculation.width", {"deployment.speculation.width": "widest"}),
    ("deployment.parallel.tensor", {"deployment.parallel.tensor": 0}),
    ("deployment.target.quantization", {"deployment.target.quantization": "int3"}),
]
"""The key that the schema's message names, and the values that it refuses."""


@pytest.mark.parametrize(("name", "changes", "line"), REFUSED, ids=[line[:60] for _, _, line in REFUSED])
def test_it_is_refused_in_a_line(name: str, changes: Changes, line: str) -> None:
    for layer in HELMS:
        said = refusal(changed(name, changes), layer)
        assert re.search(f"^  {line}", said, re.MULTILINE), said


@pytest.mark.parametrize(("key", "changes"), NOT_IN_THE_SCHEMA, ids=[str(each) for _, each in NOT_IN_THE_SCHEMA])
def test_the_schema_refuses_it_and_names_the_key(key: str, changes: Changes) -> None:
    for layer in HELMS:
        said = refusal(changed("sglang", changes), layer)
        assert "meet the specifications of the schema" in said
        assert key in said or "/" + key.replace(".", "/") in said, said


@pytest.mark.parametrize("name", CASES)
def test_the_installations_they_are_made_of_are_not_refused(name: str) -> None:
    assert refusal(case(name)) == ""


@pytest.mark.parametrize(("name", "kubernetes", "line"), OF_OLD_KUBERNETES)
def test_what_needs_a_later_kubernetes_is_refused(name: str, kubernetes: str, line: str) -> None:
    assert re.search(f"^  {line}", refusal(case(name), kubernetes=kubernetes), re.MULTILINE)


def test_an_older_kubernetes_is_refused() -> None:
    assert "incompatible with Kubernetes" in refusal(case("sglang"), kubernetes="1.29.0")


def test_all_problems_are_told_at_once() -> None:
    said = refusal(changed("sglang", {"backend": "acme", "hostNetwork": True, "route.enabled": True}))
    lines = [line.split(":")[0].strip() for line in said.splitlines() if line.startswith("  ")]
    assert lines[:3] == ["backend", "hostNetwork", "route.gateway"]


def test_every_refusal_of_the_templates_is_tried_here() -> None:
    text = (CHART / "templates" / "_validations.tpl").read_text()
    wheres = {line.split(":")[0] for line in text.splitlines() if re.match(r"[a-zA-Z.]+: ", line)}
    tried = {line.split(":")[0] for line in [line for _, _, line in REFUSED + OF_OLD_KUBERNETES]}
    needs_an_engine_without_metrics = {"autoscaling.runningPerReplica"}
    assert wheres - tried - needs_an_engine_without_metrics == set()
