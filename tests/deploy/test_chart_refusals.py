"""What cannot work is refused before anything is installed, in a line that says where, what, and what to do."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping

import pytest

from tests.deploy.test_chart_golden import CASES, case
from tests.support.chart import CHART, HELMS, Manifest, refusal
from tests.support.helm import HELM_4

Changes = Mapping[str, object]
DGX, BUILT, TWO, IMAGE, CPU, DOMAIN = (
    "tensorrt-llm-on-a-dgx",
    "tensorrt-llm-with-a-built-drafter",
    "sglang-on-two-nodes",
    "sglang-from-a-model-image",
    "torch-on-a-cpu",
    "sglang-in-one-nvlink-domain",
)
SHORT = "sha256:0123"

REFUSED: list[tuple[str, Changes, str]] = [
    # an installation, what is changed in it, the beginning of the line
    (
        "sglang",
        {"backend": "acme"},
        'backend: "acme" is none that this chart knows .sglang, tensorrt-llm, torch, vllm.; give its',
    ),
    ("sglang", {"image.repository": ""}, "image.repository: no image"),
    ("sglang", {"image.repository": "registry.example:5000/engine:latest"}, "image.repository: .* has a tag"),
    ("sglang", {"image.repository": f"registry.example/engine@{SHORT}"}, "image.repository: .* has a tag or digest"),
    ("sglang", {"image.digest": ""}, 'image.digest: "" pins nothing'),
    ("sglang", {"image.digest": "latest"}, 'image.digest: "latest" pins nothing'),
    ("sglang", {"image.digest": SHORT}, "image.digest: .* pins nothing"),
    (BUILT, {"build.image.digest": SHORT}, "build.image.digest: .* pins nothing"),
    (BUILT, {"build.image.repository": ""}, "build.image.repository: no image"),
    ("sglang", {"models.kind": "claim"}, "models.claim: kind is claim, but none is named"),
    ("sglang", {"models.claim": "weights"}, 'models.claim: "weights" would be ignored'),
    ("sglang", {"models.image": "weights"}, 'models.image: "weights" would be ignored'),
    ("sglang", {"models.storageClassName": "fast"}, 'models.storageClassName: "fast" would be ignored'),
    ("sglang", {"models.size": "much"}, 'models.size: "much" is no size'),
    ("sglang", {"models.kind": "volume", "models.size": "0Gi"}, 'models.size: "0Gi" is no size'),
    (IMAGE, {"models.image": "registry.example/weights:1"}, "models.image: .* pins nothing"),
    (IMAGE, {"deployment.target.model": "Qwen/Qwen3-8B"}, "deployment.target.model: .* would be fetched"),
    (IMAGE, {"deployment.drafter.model": "z-lab/x"}, "deployment.drafter.model: .* would be fetched"),
    (DGX, {"models.accessMode": "ReadWriteOnce"}, "models.accessMode: ReadWriteOnce serves one node, .* 8 pods"),
    (TWO, {"models.accessMode": "ReadWriteOnce", "replicas": 1}, "models.accessMode: ReadWriteOnce .* 2 pods"),
    (
        "sglang",
        {"deployment.engine_args": {"sglang": {"tensor-parallel-size": 8}}},
        "deployment.engine_args.sglang.tensor-parallel-size: .* sets it itself; set deployment.parallel.tensor",
    ),
    (
        "sglang",
        {"deployment.engine_args": {"sglang": {"speculative_algorithm": "EAGLE3"}}},
        "deployment.engine_args.sglang.speculative_algorithm: .* sets it itself; ",
    ),
    (
        DGX,
        {"deployment.engine_args": {"tensorrt-llm": {"return_perf_metrics": True}}},
        "deployment.engine_args.tensorrt-llm.return_perf_metrics: .* leave it out: metrics are always on",
    ),
    ("sglang", {"deployment.hardware.gpu": "none"}, "deployment.hardware.gpu: sglang needs a GPU"),
    (DGX, {"deployment.hardware.gpu": "none"}, "deployment.hardware.gpu: tensorrt-llm needs a GPU"),
    (CPU, {"deployment.hardware.count": 2}, "deployment.hardware.count: the embedded engine runs on one device"),
    ("sglang", {"deployment.hardware.count": 2}, "deployment.parallel: tensor 1 .* = 1 devices, but .* is 2"),
    (DGX, {"deployment.parallel.tensor": 4, "deployment.parallel.expert": 4}, "deployment.parallel: tensor 4 "),
    (DGX, {"deployment.parallel.pipeline": 2}, "deployment.parallel: .* pipeline 2 .* = 16 devices"),
    (DGX, {"deployment.parallel.context": 2}, "deployment.parallel: .* context 2 = 16 devices"),
    (DGX, {"deployment.parallel.expert": 3}, "deployment.parallel.expert: 3 does not divide tensor 8"),
    (TWO, {"deployment.parallel.nodes": 3}, "deployment.parallel.nodes: 16 devices do not spread evenly over 3"),
    (TWO, {"deployment.parallel.nodes": 1}, "deployment.parallel.nodes: 16 devices on a node, .* set it to 2"),
    (TWO, {"backend": "tensorrt-llm"}, "deployment.parallel.nodes: TensorRT-LLM starts 2 nodes by srun and MPI"),
    (TWO, {"backend": "vllm"}, "deployment.parallel.nodes: vLLM is started on one node, not 2"),
    (CPU, {"deployment.parallel.nodes": 2}, "deployment.parallel.nodes: the embedded engine runs on one node"),
    ("sglang", {"deployment.role": "prefill"}, "deployment.role: prefill is one half of a pair"),
    (DGX, {"deployment.role": "decode"}, "deployment.role: decode is one half of a pair"),
    (TWO, {"resources.extra": {"nvidia.com/gpu": 8}}, "resources.extra: nvidia.com/gpu is counted"),
    ("sglang", {"resources.memory": "64 GB"}, 'resources.memory: "64 GB" is no size'),
    ("sglang", {"resources.cpu": "many"}, 'resources.cpu: "many" is no number of CPUs'),
    (BUILT, {"build.memory": "0"}, 'build.memory: "0" is no size'),
    ("sglang", {"sharedMemory": "16GiB"}, 'sharedMemory: "16GiB" is no size'),
    ("sglang", {"scratch": ""}, 'scratch: "" is no size'),
    ("sglang", {"deployment.drafter": None, "deployment.speculation.width": 4}, "deployment.drafter: none, .* is 4"),
    ("sglang", {"deployment.drafter": None, "deployment.speculation.block_size": 8}, "deployment.drafter: none, .* 8"),
    ("sglang", {"deployment.drafter": None, "deployment.speculation.draft_window": 64}, "deployment.drafter: none"),
    (DGX, {"deployment.speculation.width": 12}, "deployment.speculation.width: 12 is larger than the block of 10"),
    (DGX, {"deployment.limits.max_num_tokens": 64}, "deployment.limits.max_num_tokens: 64 rows .* use 320 or more"),
    (DGX, {"deployment.limits.max_queued_requests": 9}, "deployment.limits.max_queued_requests: .* without bound"),
    (
        "sglang-on-two-nodes-alone",
        {"deployment.limits.max_queued_requests": 4},
        "autoscaling.queuedPerReplica: a queue ends at limits.max_queued_requests 4",
    ),
    (DGX, {"placement.computeCapability": "10.3"}, "placement.computeCapability: placement.products says it already"),
    (DGX, {"placement.products": ["NVIDIA-B300-MIG-1g.34gb"]}, "placement.products: .* is a slice"),
    ("sglang", {"placement.computeCapability": "blackwell"}, "placement.computeCapability: .* write major.minor"),
    ("sglang", {"placement.computeCapability": "9.0"}, "placement.computeCapability: 9.0 is no b200"),
    (CPU, {"placement.products": ["NVIDIA-B300"]}, "placement: a GPU is wanted, but the deployment uses none"),
    ("sglang", {"placement.topology.key": "rack"}, "placement.topology.key: a replica of one node meets nobody"),
    (TWO, {"placement.topology": {"exclusive": True}}, "placement.topology.exclusive: of what"),
    ("sglang", {"replicas": 0}, "replicas: 0 serve nobody"),
    (DGX, {"autoscaling.minReplicas": 0}, "autoscaling.minReplicas: .* nothing would start the first again"),
    (DGX, {"autoscaling.maxReplicas": 1}, "autoscaling.maxReplicas: 1 is less than minReplicas 2"),
    (DGX, {"autoscaling.queuedPerReplica": 0}, "autoscaling.queuedPerReplica: 0 would always add replicas"),
    (DGX, {"autoscaling.scaleDownSeconds": -1}, "autoscaling.scaleDownSeconds: -1 is in the past"),
    (DGX, {"podMonitor.enabled": False}, "autoscaling.kind: keda reads the queue from Prometheus"),
    (DGX, {"autoscaling.prometheusAddress": "prometheus:9090"}, "autoscaling.prometheusAddress: .* is no address"),
    (DGX, {"autoscaling.kind": "hpa"}, r"autoscaling.prometheusAddress: only keda .* \(keda and hpa exclude"),
    ("sglang", {"disruption.maxUnavailable": 0}, "disruption.maxUnavailable: 0 forbids every eviction"),
    ("sglang", {"rollout.maxUnavailable": 0}, "rollout: neither one more nor one less"),
    ("sglang", {"drain.preStopSeconds": 0}, "drain.preStopSeconds: 0 is no time"),
    ("sglang", {"drain.seconds": -5}, "drain.seconds: -5 is no time"),
    ("sglang", {"drain.marginSeconds": 0}, "drain.marginSeconds: 0 is no time; the grace must be longer"),
    ("sglang", {"startup.gigabytesPerSecond": 0}, "startup.gigabytesPerSecond: at 0 nothing ever loads"),
    ("sglang", {"startup.gigabytes": 0}, "startup.gigabytes: 0 is no size"),
    ("sglang", {"startup.baseSeconds": 5}, "startup.baseSeconds: engines start in no 5 s"),
    (BUILT, {"models": {"kind": "volume"}}, "models.kind: the build is made before the release is, and volume comes"),
    (BUILT, {"models.accessMode": "ReadWriteOnce"}, "models.accessMode: the build writes while servers of an earlier"),
    (
        DOMAIN,
        {"models": {"kind": "volume", "download": {"enabled": True}}},
        "models.download: weights have to be there",
    ),
    (DOMAIN, {"models.download.deadlineSeconds": 5}, "models.download.deadlineSeconds: nothing is fetched within 5 s"),
    ("sglang", {"models.size": "10Gi", "startup.gigabytes": 20}, "models.size: 10Gi does not hold 20 GB .* use 22G"),
    ("sglang", {"models.kind": "node"}, 'models.path: "" and kind node do not go together'),
    ("sglang", {"cache.path": "/raid/cache"}, 'cache.path: "/raid/cache" and kind emptyDir do not go together'),
    ("sglang", {"cache.kind": "models"}, "cache.kind: models of kind emptyDir keep nothing"),
    (TWO, {"models.encodings": "/data"}, 'models.encodings: "/data" is not below /models'),
    (DGX, {"networkPolicy.egressPorts": []}, "models.encodings: gpt-oss reads o200k_base.tiktoken"),
    ("sglang", {"resources.memory": "16Gi"}, "resources.memory: 16Gi is all taken by sharedMemory 16Gi"),
    (TWO, {"placement.topology.key": "nvidia.com/gpu.clique"}, "placement.topology.key: b300 has no NVLink between"),
    (DOMAIN, {"placement.computeDomain": False}, "placement.computeDomain: gb300 on 2 nodes has no NVLink between"),
    (TWO, {"placement.computeDomain": True}, "placement.computeDomain: there is a domain over several nodes of gb200"),
    (DOMAIN, {"replicas": 2}, "placement.computeDomain: a domain belongs to one replica"),
    (DOMAIN, {"deployment.parallel.nodes": 1}, "deployment.parallel.nodes: 8 devices on a node, there are at most 4"),
    ("sglang", {"placement.architecture": "arm64"}, "placement.architecture: b200 is on no arm64 node"),
    (DGX, {"autoscaling.runningPerReplica": -1}, "autoscaling.runningPerReplica: -1 is no number of requests"),
    (
        "sglang-on-two-nodes-alone",
        {"autoscaling.interTokenSeconds": 0.1},
        "autoscaling.interTokenSeconds: a percentile",
    ),
    (DGX, {"networkPolicy.namespaces": []}, "podMonitor.enabled: Prometheus comes from another namespace"),
    ("sglang", {"alerts.enabled": True}, "alerts.enabled: nothing is scraped that they could look at"),
    ("sglang", {"networkPolicy.dnsPorts": [0]}, "networkPolicy.dnsPorts: 0 is no port"),
    ("sglang", {"hostNetwork": True}, "hostNetwork: a network policy does not hold for it"),
    ("sglang", {"env": [{"name": "A"}]}, "env: A needs a value or a valueFrom"),
    ("sglang", {"env": [{"name": "A", "valueFrom": {}}]}, "env: nothing in one valueFrom; give exactly one"),
    ("sglang", {"extraVolumes": [{"name": "cache", "emptyDir": {}}]}, "extraVolumes: cache would hide a volume"),
    ("sglang", {"extraVolumeMounts": [{"name": "x", "mountPath": "/tmp"}]}, 'extraVolumeMounts: "/tmp" is this chart'),
    ("sglang", {"initContainers": [{"name": "check-node"}]}, 'initContainers: "check-node" is no name for yours'),
    ("sglang", {"labels": {"app.kubernetes.io/name": "x"}}, "labels: app.kubernetes.io/name is set by this chart"),
    ("sglang", {"inferencePool.enabled": True}, "inferencePool.endpointPicker: none"),
    ("sglang", {"route.enabled": True}, 'route.gateway: "" with route.enabled true'),
    (
        "sglang",
        {"deployment.serving": {"otlp_traces_endpoint": "http://collector:4317"}},
        "deployment.serving.otlp_traces_endpoint: networkPolicy.egressPorts forbids port 4317",
    ),
    ("sglang", {"route.canary.service": "x"}, "route.canary.service: would be ignored"),
    ("sglang", {"route.canary.weight": 5}, "route.canary.weight: 5 percent of the requests for nobody"),
    ("sglang", {"tests.acceptance.schedule": "0 * * * *"}, "tests.acceptance.schedule: would be ignored"),
    (DGX, {"tests.acceptance.atLeast": 2}, "tests.acceptance.atLeast: any of 8 replicas would answer"),
    (BUILT, {"build.recipe": ""}, "build.recipe: nothing to build"),
    (BUILT, {"build.recipe": "a: b: c"}, "build.recipe: not valid YAML"),
    (BUILT, {"build.recipe": "target: {model: x}"}, "build.recipe: no recipe"),
    (BUILT, {"build.deadlineSeconds": 1}, "build.deadlineSeconds: no build ends within 1 s"),
    (BUILT, {"deployment.drafter.model": "z-lab/x"}, "build.enabled: nothing of it is served"),
    (BUILT, {"build.enabled": False}, "deployment.drafter.model: below /build, but nothing is built"),
    ("sglang", {"build.recipe": "deployment: {}"}, "build.recipe: would be ignored"),
    (DGX, {"secrets.apiKeys.name": "clients"}, "secrets.apiKeys.name: tensorrt-llm is started without keys"),
    (DGX, {"deployment.parallel.data": 2}, "deployment.parallel.data: tensorrt-llm has one copy of the model"),
    ("sglang", {"service.type": "LoadBalancer"}, "service.type: LoadBalancer opens a server without keys"),
    (DGX, {"secrets.huggingFaceToken.key": ""}, "secrets.huggingFaceToken.key: none"),
    ("sglang", {"service.port": 70000}, "service.port: 70000 is no port"),
    ("sglang", {"networkPolicy.egressPorts": [0]}, "networkPolicy.egressPorts: 0 is no port"),
    (IMAGE, {"serviceAccount.annotations": {"a": "b"}}, "serviceAccount.annotations: would be ignored"),
    ("sglang", {"user": 0}, "user: 0 is root"),
    (
        "sglang",
        {"env": [{"name": "DFLASH_SERVE_SPECULATION__WIDTH", "value": "off"}]},
        "env: .* overrule the deployment",
    ),
    ("sglang", {"env": [{"name": "LWS_GROUP_SIZE", "value": "1"}]}, "env: LWS_GROUP_SIZE is LeaderWorkerSet's"),
    ("sglang", {"env": [{"name": "HF_TOKEN", "value": "x"}]}, "env: HF_TOKEN is a secret"),
    ("sglang", {"env": [{"name": "TOKEN", "value": "hf_abcdefgh"}]}, "env: TOKEN looks like a Hugging Face token"),
    ("sglang", {"env": [{"name": "HOME", "value": "/root"}]}, "env: HOME is set by this chart"),
    ("sglang", {"podLabels": {"app.kubernetes.io/component": "x"}}, "podLabels: .* is what the Service selects by"),
    ("sglang", {"fullnameOverride": "Qwen"}, 'fullnameOverride: "Qwen" is no name'),
    ("sglang", {"tests.verify": {"enabled": True}}, "tests.verify.without: .* is no address"),
    ("sglang", {"tests.verify": {"without": "http://plain"}}, "tests.verify.without: would be ignored"),
    ("sglang", {"tests.verify": {"schedule": "0 3 * * *"}}, "tests.verify.schedule: would be ignored"),
    (DGX, {"deployment.drafter": None}, "tests.verify.enabled: there is no speculation to verify"),
]


FIRST_OF_SECTION = {re.split("[.:]", line)[0]: line for _, _, line in reversed(REFUSED)}
"""A line of each section of the values: helm 3 is asked for these only, since the templates are the same."""


def changed(name: str, changes: Changes) -> Manifest:
    """The values of an installation, with `a.b: value` set."""
    given = copy.deepcopy(case(name))
    for dotted, value in changes.items():
        *outer, last = dotted.split(".")
        inner = given
        for key in outer:
            inner = inner.setdefault(key, {})
        if value is None:
            inner.pop(last, None)
        else:
            inner[last] = value
    return given


@pytest.mark.parametrize(("name", "changes", "line"), REFUSED, ids=[line[:60] for _, _, line in REFUSED])
def test_it_is_refused_with_our_message(name: str, changes: Changes, line: str) -> None:
    for layer in HELMS if line in FIRST_OF_SECTION.values() else [HELM_4]:
        said = refusal(changed(name, changes), layer)
        assert re.search(f"^  {line}", said, re.MULTILINE), said


@pytest.mark.parametrize("name", CASES)
def test_the_installations_they_are_made_of_are_not_refused(name: str) -> None:
    assert refusal(case(name)) == ""


def test_an_image_volume_needs_a_kubernetes_that_has_them() -> None:
    assert "models.kind: image volumes came with Kubernetes 1.33" in refusal(case(IMAGE), kubernetes="1.32.0")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (TWO, "placement.topology.key: .* from Kubernetes 1.31"),
        (DOMAIN, "placement.computeDomain: .* needs Kubernetes 1.32"),
    ],
)
def test_what_came_with_a_later_kubernetes_is_refused_by_name(name: str, line: str) -> None:
    assert re.search(line, refusal(case(name), kubernetes="1.30.0"))


def test_an_older_kubernetes_is_refused() -> None:
    assert "incompatible with Kubernetes" in refusal(case("sglang"), kubernetes="1.29.0")


def test_all_problems_are_said_at_once() -> None:
    said = refusal(changed("sglang", {"image.digest": "", "replicas": 0, "drain.seconds": 0}))
    assert [line.split(":")[0].strip() for line in said.splitlines() if line.startswith("  ")][:3] == [
        *("image.digest", "replicas", "drain.seconds"),
    ]


def test_every_refusal_that_the_chart_knows_is_tried_here() -> None:
    """A `where` of `_validations*.tpl` that no case above brings about would be a promise that nobody kept."""
    text = "".join(path.read_text() for path in (CHART / "templates").glob("_validations*.tpl"))
    wheres = {line.split(":")[0] for line in text.splitlines() if re.match(r"[a-zA-Z.]+: ", line)}
    tried = {re.split(r":", line)[0] for _, _, line in REFUSED}
    assert wheres - tried - {"deployment.{{ $name }}.model"} == set()
