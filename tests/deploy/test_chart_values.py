"""Values: values.yaml is the one place of a default; impossible values are refused before anything is installed, by the
schema or in a line that says where, what and what to do.
"""

from __future__ import annotations

import copy
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_serve.deploying.chart import DASHBOARD, ENGINES, write_chart
from dflash_serve.deploying.values_schema import values_schema
from dflash_serve.errors import UserError
from tests.deploy import test_chart_pair
from tests.support.chart import BACKENDS, CHART, DIGEST, HELMS, case, changed, of_kind, refusal, render, whole_chart

jsonschema: Any = import_module("jsonschema")
SCHEMA = values_schema(CHART / "values.yaml")
MISSPELT = [
    *("replica", "deployment.targets", "deployment.speculation.widht", "image.tag", "models.kinds", "build.image.tag"),
    *("secrets.apiKeys.value", "tests.verify.url", "engine.probes.up", "models.download.on", "route.canary.to"),
]


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
    (IMAGE, {"models.image": ""}, 'models.image: "" and kind image do not go together'),
    ("sglang", {"models.image": f"x@{DIGEST}"}, "models.image: .* and kind emptyDir do not go together"),
    ("sglang", {"models.storageClassName": "weka"}, 'models.storageClassName: "weka" and kind emptyDir do not go'),
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
    (TWO, {"certify.enabled": True}, "certify.enabled: it compares a server on one node"),
    (DGX, {"certify.enabled": True}, "certify.enabled: the Job runs before the release exists"),
    (TWO, {"backend": "tensorrt-llm"}, "deployment.parallel.nodes: the chart starts tensorrt-llm on one node, not 2"),
    (TWO, {"deployment.parallel.nodes": 3}, "deployment.parallel.nodes: 16 devices do not spread evenly over 3"),
    ("sglang", {"deployment.role": "prefill"}, "deployment.role: prefill is one half of a pair"),
    (DOMAIN, {"replicas": 2}, "placement.computeDomain: a domain belongs to one replica"),
    ("sglang", {"placement.topology.key": "leaf"}, "placement.topology.key: it keeps the nodes of one"),
    (
        "vllm",
        {"deployment.engine_args": {"vllm": {"shutdown_timeout": 5}}},
        "deployment.engine_args.vllm: shutdown_timeout is set by the chart; set drain.seconds",
    ),
    (DGX, {"autoscaling.maxReplicas": 1}, "autoscaling.maxReplicas: 1 is less than minReplicas 2"),
    (DGX, {"podMonitor.enabled": False}, "autoscaling.kind: keda reads the queue from Prometheus"),
    (DGX, {"podMonitor.enabled": False}, "alerts.enabled: the alerts read metrics that are not scraped"),
    (DGX, {"autoscaling.kind": "hpa"}, "autoscaling.prometheusAddress: .* and kind hpa do not go together"),
    (
        "sglang-on-two-nodes-alone",
        {"autoscaling.interTokenSeconds": 0.1},
        "autoscaling.interTokenSeconds: needs kind keda",
    ),
    (
        DGX,
        {"autoscaling.headroom": 0.8},
        "autoscaling.headroom: needs kind keda, and an engine whose widths our policy",
    ),
    (
        DGX,
        {"backend": "vllm", "autoscaling.headroom": 0.8, "deployment.speculation": {"width": 4}},
        "autoscaling.headroom: with deployment.speculation.width 4 no policy chooses widths",
    ),
    (DGX, {"secrets.apiKeys.name": "clients"}, "secrets.apiKeys.name: tensorrt-llm has no API keys"),
    ("sglang", {"service.type": "LoadBalancer"}, "service.type: LoadBalancer opens a server without keys"),
    ("sglang", {"hostNetwork": True}, "hostNetwork: the network policy does not apply to it"),
    (DGX, {"networkPolicy.namespaces": []}, "podMonitor.enabled: Prometheus comes from another namespace"),
    ("sglang", {"inferencePool.enabled": True}, "inferencePool.endpointPicker: none"),
    ("sglang", {"route.enabled": True}, "route.gateway: none"),
    ("sglang", {"route.canary.service": "trial-dflash-serve"}, "route.canary.service: .* of this release"),
    ("sglang", {"route.canary.weight": 10}, "route.canary.service: none for 10 % of the requests"),
    ("sglang", {"env": [{"name": "DFLASH_SERVE_X", "value": "off"}]}, "env: DFLASH_SERVE_X is set by the chart or by"),
    ("sglang", {"env": [{"name": "LWS_GROUP_SIZE", "value": "1"}]}, "env: LWS_GROUP_SIZE is set by the chart"),
    ("sglang", {"env": [{"name": "HF_TOKEN", "value": "x"}]}, "env: HF_TOKEN is a secret"),
    ("sglang", {"env": [{"name": "TOKEN", "value": "hf_abcdefgh"}]}, "env: TOKEN is a secret"),
    ("sglang", {"podLabels": {"app.kubernetes.io/component": "x"}}, "podLabels: .* selects the pods of the Service"),
    (DGX, {"tests.acceptance.atLeast": 2}, "tests.acceptance.atLeast: needs one replica"),
    ("sglang", {"tests.verify": {"enabled": True}}, "tests.verify.without: none"),
    ("sglang", {"tests.verify.schedule": "0 3 * * *"}, "tests.verify.schedule: verify is not enabled"),
    ("sglang", {"tests.acceptance.schedule": "0 * * * *"}, "tests.acceptance.schedule: no minimum is given"),
]
OF_OLD_KUBERNETES = [
    (IMAGE, "1.32.0", "models.kind: image volumes need Kubernetes 1.33"),
    (TWO, "1.30.0", "placement.topology.key: needs Kubernetes 1.31"),
    (DOMAIN, "1.30.0", "placement.computeDomain: .* needs Kubernetes 1.32"),
]
NOT_IN_THE_SCHEMA: list[tuple[str, Changes]] = [
    ("image.repository", {"image.repository": "registry.example:5000/engine:latest"}),
    ("image.digest", {"image.digest": "sha256:0123"}),
    ("image.pullPolicy", {"image.pullPolicy": "Sometimes"}),
    ("build.gpus", {"build.gpus": -1}),
    ("certify.concurrency", {"certify.concurrency": "1;8"}),
    ("models.size", {"models.size": "much"}),
    ("models.image", {"models.image": "registry.example/weights:1"}),
    ("models.encodings", {"models.encodings": "/data"}),
    ("models.download.deadlineSeconds", {"models.download.deadlineSeconds": 5}),
    ("resources.memory", {"resources.memory": "64 GB"}),
    ("resources.cpu", {"resources.cpu": "many"}),
    ("placement.computeCapability", {"placement.computeCapability": "blackwell"}),
    ("replicas", {"replicas": 0}),
    ("replicas", {"replicas": "two"}),
    ("autoscaling.prometheusAddress", {"autoscaling.prometheusAddress": "prometheus:9090"}),
    ("drain.seconds", {"drain.seconds": -5}),
    ("autoscaling.scaleDownSeconds", {"autoscaling.scaleDownSeconds": 7200}),
    ("startup.gigabytes", {"startup.gigabytes": 0}),
    ("networkPolicy.egressPorts.0", {"networkPolicy.egressPorts": [0]}),
    ("service.port", {"service.port": 70000}),
    ("user", {"user": 0}),
    ("fullnameOverride", {"fullnameOverride": "Qwen"}),
    ("tests.verify.without", {"tests.verify": {"enabled": True, "without": "plain"}}),
    ("env.0", {"env": [{"name": "A"}]}),
    ("env.0.valueFrom", {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "x"}}}]}),
    ("engine.probes", {"engine": {"probes": {}}}),
    ("deployment.hardware.gpu", {"deployment.hardware.gpu": "b100"}),
    ("deployment.speculation.width", {"deployment.speculation.width": "widest"}),
    ("deployment.parallel.tensor", {"deployment.parallel.tensor": 0}),
]
"""The key that the schema's message names, and the values that it refuses: one for each kind of rule."""


def test_the_folder_of_a_checkout_says_how_the_whole_chart_is_made() -> None:
    assert "run `make chart` and use build/dflash-serve" in refusal(case("sglang"), chart=CHART)


def test_the_schema_has_the_defaults_and_comments_of_values_yaml() -> None:
    sections = SCHEMA["properties"]
    assert sections["replicas"]["default"] == 1
    assert "autoscaling overrules it" in sections["replicas"]["description"]
    assert "hub" in sections["networkPolicy"]["properties"]["egressPorts"]["description"]
    assert sections["models"]["properties"]["download"]["properties"]["enabled"]["type"] == "boolean"
    assert "dflash-serve serve" in sections["deployment"]["description"]
    keys = [inner for section in sections.values() for inner in section.get("properties", {}).values()]
    assert sum("description" in inner for inner in keys) > 50


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
    lines = [*(line for _, _, line in REFUSED + OF_OLD_KUBERNETES), *(line for _, line in test_chart_pair.REFUSED)]
    tried = {line.split(":")[0] for line in lines}
    need_another_engine_or_chart = {"autoscaling.runningPerReplica", "chart"}
    assert wheres - tried - need_another_engine_or_chart == set()


@pytest.mark.parametrize("key", MISSPELT)
def test_an_error_names_a_misspelt_key(key: str) -> None:
    for layer in HELMS:
        said = refusal(changed("tensorrt-llm-with-a-built-drafter", {key: {}}), layer)
        last = key.rsplit(".", 1)[-1]
        assert re.search(rf"additional propert(y|ies) '?{last}'? (is )?not allowed", said, re.IGNORECASE), said


WHOLE: Changes = {
    **{"podMonitor.enabled": True, "route.enabled": True, "route.gateway": "g", "autoscaling.kind": "keda"},
    **{
        "autoscaling.prometheusAddress": "http://a:1",
        "autoscaling.interTokenSeconds": 1,
        "autoscaling.headroom": 0.8,
        "tests.verify": {"enabled": True, "without": "http://plain"},
    },
    **{"networkPolicy.namespaces": ["m"], "alerts.enabled": True, "secrets.huggingFaceToken.name": "h"},
}
ACME: Changes = {
    "backend": "acme",
    "engine": {
        "probes": {"started": "/a", "live": "/b", "ready": "/c"},
        **{"metricsPath": "/m", "queued": "q", "running": "r", "interTokenLatency": "i", "queueTime": "t"},
        **{"tokensGained": "g", "tokensExpected": "e"},
        **{"needsGpu": True, "serverFlags": [], "environment": {"A": "b"}},
    },
}
INJECTED: dict[str, tuple[str, Changes, tuple[str, ...]]] = {
    "sglang": (
        "sglang",
        WHOLE,
        (
            *("image.repository", "serviceAccount.name", "fullnameOverride", "scratch", "sharedMemory", "models.size"),
            *("placement.schedulerName", "placement.products", "route.gateway", "route.hostnames", "labels.k"),
            *("podLabels.k", "podAnnotations.k", "secrets.huggingFaceToken.key", "networkPolicy.namespaces"),
            *("autoscaling.prometheusAddress", "security.seccompProfile", "resources.memory", "resources.extra.k"),
            *("deployment.serving.served_model_name", "deployment.target.model", "tests.verify.schedule"),
        ),
    ),
    "another engine": (
        "sglang",
        {**WHOLE, **ACME},
        (
            *("backend", "engine.probes.started", "engine.probes.live", "engine.probes.ready", "engine.metricsPath"),
            *("engine.queued", "engine.interTokenLatency", "engine.queueTime", "engine.environment.A"),
            *("engine.tokensGained", "engine.tokensExpected"),
        ),
    ),
    "nodes": (TWO, {"placement.topology.exclusive": True}, ("placement.topology.key",)),
    "claim": ("sglang", {"models.kind": "claim", "models.claim": "c"}, ("models.claim",)),
    "volume": ("sglang", {"models.kind": "volume"}, ("models.storageClassName",)),
    "node": ("sglang", {"models.kind": "node", "models.path": "/x"}, ("models.path",)),
}
"""An installation, what is changed in it, and the keys whose values are injected."""
OBJECTS_OF_TEXT = ("labels.k", "podLabels.k", "podAnnotations.k", "engine.environment.A")  # written by toYaml or quote
LISTS = ("placement.products", "route.hostnames", "networkPolicy.namespaces")


@pytest.mark.parametrize("given", ["x}, privileged: {true", "x\nprivileged: true", "true"])
@pytest.mark.parametrize("name", INJECTED)
def test_a_value_stays_text_or_is_refused_by_the_schema(name: str, given: str) -> None:
    installation, changes, keys = INJECTED[name]
    injected, plain = copy.deepcopy(changes), copy.deepcopy(changes)
    for key in keys:
        for prefix in ("", "/", "http://"):
            told = {key: [prefix + given] if key in LISTS else prefix + given}
            if jsonschema.Draft7Validator(SCHEMA).is_valid(changed(installation, {**copy.deepcopy(changes), **told})):
                injected |= told
                plain[key] = [f"{prefix}x"] if key in LISTS else f"{prefix}x"
                break
    assert "\n" not in given or injected.keys() <= {*changes, *OBJECTS_OF_TEXT}
    assert shape(render(changed(installation, injected))) == shape(render(changed(installation, plain)))


def shape(document: Any) -> Any:
    """Keys, lengths and types, without the texts."""
    if isinstance(document, dict):
        return {key: shape(value) for key, value in document.items()}
    return [shape(value) for value in document] if isinstance(document, list) else type(document)


def test_the_target_cannot_be_forgotten() -> None:
    assert all("target" in refusal({}, layer) for layer in HELMS)


def test_a_parent_chart_may_hold_it() -> None:
    """Helm hands `global` to every subchart."""
    assert refusal(changed("sglang", {"global": {"imageRegistry": "x"}})) == ""


def test_the_chart_knows_the_backends_whose_drafters_its_probe_can_see_accept() -> None:
    known = yaml.safe_load((whole_chart() / ENGINES).read_text())
    probe = (CHART / "files" / "ready.py").read_text().rpartition("ASK = {")[2].partition("}")[0]
    assert set(known) == set(BACKENDS) == set(re.findall(r'"([\w-]+)":', probe))


def test_the_dashboard_of_the_whole_chart_is_in_its_config_map() -> None:
    found = [
        m["data"] for m in of_kind(render(case(DGX)), "ConfigMap") if "grafana_dashboard" in m["metadata"]["labels"]
    ]
    assert found == [{"dflash-serve.json": (whole_chart() / DASHBOARD).read_text()}]


def test_a_whole_chart_is_not_written_over_something(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name a folder that is not there yet"):
        write_chart(tmp_path)


def test_helm_reads_a_width_of_off_as_a_boolean_which_the_schema_takes() -> None:
    for width, taken in (("off", True), ("'off'", True), ("auto", True), ("on", False)):
        given = yaml.safe_load(f"deployment: {{target: {{model: x}}, speculation: {{width: {width}}}}}")
        assert jsonschema.Draft7Validator(SCHEMA).is_valid(given) is taken, width
