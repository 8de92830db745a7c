"""A pod: what it asks of its node, the times it has for loading and ending, and what of the user's stands in it."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_serve.adapter.counters import EXPECTED, GAINED
from dflash_serve.adapter.registry import backend as backend_named
from dflash_serve.deployment.gpus import GPUS
from tests.support.chart import (
    BACKENDS,
    CASES,
    CHART,
    ROOT,
    Manifest,
    case,
    config,
    of_kind,
    only,
    pods,
    recipe_deployment,
    render,
    server,
    server_pod,
    values,
    whole_chart,
)

QWEN = {"target": {"model": "Qwen/Qwen3-8B"}, "hardware": {"gpu": "b200"}}
CA = {"name": "ca", "configMap": {"name": "private-ca"}}
NODE_IP = {"name": "NODE_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}
FIRST = {"name": "tune", "image": "registry.example/tune@sha256:0", "command": ["tune"]}
ENGINES = ("Deployment", "LeaderWorkerSet")


def engines(manifests: list[Manifest]) -> list[Manifest]:
    """Specs of the pods in which an engine runs."""
    return [pod["spec"] for label, pod in pods(manifests) if label.split()[0] in ENGINES]


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


def test_vllm_is_told_how_long_answers_may_go_on() -> None:
    """Its own default aborts them when SIGTERM comes."""
    args = server(render({**case("vllm"), "drain": {"seconds": 600}}))["args"]
    assert args[args.index("--") :] == ["--", "--shutdown-timeout=600"]


def test_a_bare_off_is_read_by_helm_as_false_and_means_no_speculation() -> None:
    given = case("tensorrt-llm-on-a-dgx")
    given["deployment"]["speculation"] = {"width": False}
    manifests = render(given)
    assert "httpGet" in server(manifests)["readinessProbe"]
    rules = [rule["alert"] for rule in only(manifests, "PrometheusRule")["spec"]["groups"][0]["rules"]]
    assert "DFlashAcceptanceLow" not in rules


def test_a_long_drain_is_within_what_an_autoscaler_accepts() -> None:
    given = {**case("tensorrt-llm-with-a-built-drafter"), "drain": {"seconds": 3600}}
    (policy,) = only(render(given), "HorizontalPodAutoscaler")["spec"]["behavior"]["scaleDown"]["policies"]
    assert policy["periodSeconds"] == 1800  # autoscaling/v2 accepts no more


def test_a_load_is_given_the_time_its_size_takes() -> None:
    startup = {"baseSeconds": 120, "gigabytes": 16.4, "gigabytesPerSecond": 0.1}
    wanted = 120 + 16.4 / 0.1
    assert wanted <= seconds_to_start(startup=startup) < wanted + 10
    eight = {**QWEN, "parallel": {"tensor": 8}, "hardware": {"gpu": "b300", "count": 8}}
    unknown = seconds_to_start(deployment=eight)  # may be as large as the GPUs
    assert unknown >= 1500 + math.ceil(8 * 268 / 0.5) > seconds_to_start()


def test_a_start_with_an_empty_cache_is_not_cut_off_while_kernels_are_compiled() -> None:
    """SGLang logs that DeepGEMM's take 10 to 20 minutes (srt/layers/deep_gemm_wrapper/compile_utils.py)."""
    assert seconds_to_start(startup={"gigabytes": 1}) > 20 * 60


@pytest.mark.parametrize("name", CASES)
def test_every_engine_has_a_grace_and_a_busy_server_is_not_a_dead_one(name: str) -> None:
    """Liveness asks the shallow route, and longer than one slow answer."""
    manifests = render(case(name))
    assert {spec["terminationGracePeriodSeconds"] for spec in engines(manifests)} == {150}
    component = "app.kubernetes.io/component"
    servers = [pod["spec"] for _, pod in pods(manifests) if pod["metadata"]["labels"][component] == "server"]
    for spec in servers:
        probe = spec["containers"][0]["livenessProbe"]
        assert probe["httpGet"]["path"] == ("/live" if name.startswith("torch") else "/health")
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 60
    assert servers


def test_a_changed_deployment_is_a_new_pod_and_a_changed_chart_is_none() -> None:
    def template(**deployment: Any) -> Manifest:
        return server_pod(render(values("sglang", {**given, **deployment})))

    given = {**QWEN, "drafter": {"model": "z-lab/Qwen3-8B-DFlash-b16"}}
    assert template() != template(limits={"max_batch_size": 8})
    mounted = render(values("sglang", given, tests={"acceptance": {"atLeast": 2}}))
    assert "acceptance.py" in config(mounted)
    assert server_pod(mounted) == template()  # a file that only tests read restarts no server


@pytest.mark.parametrize("name", ["sglang-on-two-nodes", "tensorrt-llm-with-a-built-drafter"])
def test_a_bump_of_the_chart_restarts_no_engine(name: str, tmp_path: Path) -> None:
    """Another version of chart and program, and other scripts of `helm test`: the same pods."""
    bumped = tmp_path / CHART.name
    shutil.copytree(whole_chart(), bumped)
    described = (bumped / "Chart.yaml").read_text()
    (bumped / "Chart.yaml").write_text(re.sub(r"(?m)^(version|appVersion): .*", r"\1: 9.8.7", described))
    for script in ("ask.py", "acceptance.py", "fetch.py"):
        (bumped / "files" / script).write_text("# another\n")
    before, after = render(case(name)), render(case(name), chart=bumped)
    assert "dflash-serve-9.8.7" in {manifest["metadata"]["labels"]["helm.sh/chart"] for manifest in after}
    found = [[m["spec"] for m in manifests if m["kind"] in ENGINES] for manifests in (before, after)]
    assert found[0] == found[1] != []


def test_volumes_variables_and_containers_of_the_users_stand_beside_ours() -> None:
    mount = {"name": "ca", "mountPath": "/etc/ssl/private-ca", "readOnly": True}
    doors = {"extraVolumes": [CA], "extraVolumeMounts": [mount], "env": [NODE_IP], "initContainers": [FIRST]}
    found = engines(render({**case("sglang-on-two-nodes"), **doors}))
    assert len(found) == 2
    for spec in found:
        assert CA in spec["volumes"]
        assert [each["name"] for each in spec["initContainers"]] == ["check-node", "tune"]
        assert mount in spec["containers"][0]["volumeMounts"]
        assert NODE_IP in spec["containers"][0]["env"]


def test_the_nodes_network_is_the_engines_alone_and_names_are_still_found() -> None:
    given = {**case("sglang-on-two-nodes"), "hostNetwork": True, "networkPolicy": {"enabled": False}}
    for label, pod in pods(render(given)):
        engine = label.startswith(ENGINES)
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


@pytest.mark.parametrize("name", BACKENDS)
def test_probes_scraping_and_scaling_use_the_engines_own_names(name: str) -> None:
    given = values(name, recipe_deployment("qwen3-8b-b200"), podMonitor={"enabled": True})
    given |= {"networkPolicy": {"namespaces": ["monitoring"]}, "readiness": {"acceptance": False}}
    loads: dict[str, Any] = {"runningPerReplica": 16, "maxReplicas": 8}
    keda = {**loads, "kind": "keda", "interTokenSeconds": 0.02, "prometheusAddress": "http://prometheus:9090"}
    keda |= {"headroom": 0.8} if backend_named(name).facts.speculation.headroom else {}
    manifests, facts = render({**given, "autoscaling": keda}), backend_named(name).facts
    container, metrics = server(manifests), facts.metrics
    probes = [container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert probes == [facts.probes.started, facts.probes.live, facts.probes.ready]
    assert facts.environment.items() <= {entry["name"]: entry["value"] for entry in container["env"]}.items()
    assert only(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["path"] == metrics.path
    paced = facts.speculation.headroom is not None
    queue, batch, between, *headroom = [
        (trigger["metricType"], trigger["metadata"]["query"], trigger["metadata"]["threshold"])
        for trigger in only(manifests, "ScaledObject")["spec"]["triggers"]
    ]
    where = '{namespace="serving", app_kubernetes_io_instance="trial"}'
    assert queue == ("AverageValue", f"sum({metrics.queued}{where})", "5")
    assert batch == ("AverageValue", f"sum({metrics.running}{where})", "16")
    assert between[1].startswith(f"histogram_quantile(0.95, sum by (le) (rate({metrics.inter_token_latency}_bucket{{")
    assert (between[0], between[2]) == ("Value", "0.02")
    expected, gained = (f"sum(rate({each}_total{where}[5m]))" for each in (EXPECTED, GAINED))
    assert headroom == ([("Value", f"0.8 * {expected} / ({gained} > 0)", "1")] if paced else [])
    hpa = only(render({**given, "autoscaling": {**loads, "kind": "hpa"}}), "HorizontalPodAutoscaler")
    asked = [metric["pods"]["metric"]["name"] for metric in hpa["spec"]["metrics"]]
    assert asked == [metrics.queued, metrics.running]


def test_helm_test_ends_within_helms_five_minutes_beside_a_server_where_the_image_is() -> None:
    asking = sorted(of_kind(render(case("sglang-on-two-nodes")), "Pod"), key=lambda pod: str(pod["metadata"]["name"]))
    assert [pod["metadata"]["name"].rpartition("-")[2] for pod in asking] == ["chat", "stream"]
    for pod in asking:
        assert pod["spec"]["activeDeadlineSeconds"] < 300
        (beside,) = pod["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert beside["topologyKey"] == "kubernetes.io/hostname"
        # helm 3 reads the logs of `helm test --logs` after it has deleted what `hook-succeeded` deletes (helm #9098).
        assert pod["metadata"]["annotations"]["helm.sh/hook-delete-policy"] == "before-hook-creation"
        assert beside["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "server"


def test_each_installation_is_checked_for_what_it_needs() -> None:
    def checks_of(name: str) -> list[str]:
        containers = server_pod(render(case(name)))["spec"].get("initContainers", [])
        return next((c["args"] for c in containers if c["name"] == "check-node"), [])

    encodings = "--file=/models/encodings/o200k_base.tiktoken"
    assert checks_of("sglang") == []
    assert checks_of("sglang-on-two-nodes") == ["--memlock", "--writable=/models", "--writable=/cache", encodings]
    assert checks_of("sglang-in-one-nvlink-domain") == ["--memlock", "--writable=/cache", encodings]
    assert checks_of("tensorrt-llm-with-a-built-drafter") == ["--writable=/models"]


@pytest.mark.parametrize(("name", "architecture"), [("sglang", "amd64"), ("sglang-in-one-nvlink-domain", "arm64")])
def test_a_gpu_is_whole_and_its_node_runs_the_image(name: str, architecture: str) -> None:
    affinity = server_pod(render(case(name)))["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    found = {each["key"]: (each["operator"], each.get("values", [])) for each in term["matchExpressions"]}
    assert found["kubernetes.io/arch"] == ("In", [architecture])
    assert found["nvidia.com/gpu.slices.gi"] == ("DoesNotExist", [])


def test_every_gpu_has_nodes_of_its_own_and_time_to_load_what_it_holds() -> None:
    nodes = {}
    for gpu in GPUS.values():
        manifests = render(values("sglang", {**QWEN, "hardware": {"gpu": gpu.name}}))
        affinity = server_pod(manifests)["spec"]["affinity"]["nodeAffinity"]
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        nodes[gpu.name] = term["matchExpressions"]
        probe = server(manifests)["startupProbe"]
        rate = yaml.safe_load((CHART / "values.yaml").read_text())["startup"]["gigabytesPerSecond"]
        assert probe["periodSeconds"] * probe["failureThreshold"] > gpu.memory / 1e9 / rate
    for gpu in GPUS.values():
        major, minor = divmod(gpu.compute, 10)
        labels = {
            "nvidia.com/gpu.compute.major": major, "nvidia.com/gpu.compute.minor": minor,
            "nvidia.com/gpu.memory": gpu.memory >> 20, "kubernetes.io/arch": "arm64" if gpu.arm else "amd64",
        }  # fmt: skip
        assert [name for name, terms in nodes.items() if all(holds(term, labels) for term in terms)] == [gpu.name]


def holds(term: dict[str, Any], labels: dict[str, Any]) -> bool:
    """A node with these labels meets a term of an affinity."""
    have: Any = labels.get(term["key"])
    wanted = term.get("values", [])
    if term["operator"] in ("Gt", "Lt"):
        return (int(have) > int(wanted[0])) is (term["operator"] == "Gt")
    return (str(have) in wanted) if term["operator"] == "In" else have is None


def test_a_pod_asks_for_its_share_of_the_node() -> None:
    resources = server(render(case("tensorrt-llm-on-a-dgx")))["resources"]
    assert (resources["requests"]["cpu"], resources["limits"]["memory"]) == ("64", "512Gi")
    assert int(resources["requests"]["ephemeral-storage"]) == 3 * 50 * 2**30
    alone = server(render(case("sglang")))["resources"]["requests"]
    assert (alone["cpu"], int(alone["ephemeral-storage"])) == ("8", (500 + 3 * 50) * 2**30)


def test_trays_of_a_rack_are_one_nvlink_domain() -> None:
    manifests = render(case("sglang-in-one-nvlink-domain"))
    domain = only(manifests, "ComputeDomain")["spec"]
    assert domain["numNodes"] == 2
    for spec in engines(manifests):
        (claim,) = spec["resourceClaims"]
        assert claim["resourceClaimTemplateName"] == domain["channel"]["resourceClaimTemplate"]["name"]
        assert spec["containers"][0]["resources"]["claims"] == [{"name": claim["name"]}]
        assert "runAsUser" not in spec["securityContext"]  # user: null, as OpenShift wants it


def test_an_eviction_of_any_node_counts_and_caches_outlive_a_pod() -> None:
    manifests = render(case("sglang-on-two-nodes"))
    (expression,) = only(manifests, "PodDisruptionBudget")["spec"]["selector"]["matchExpressions"]
    assert expression["values"] == ["server", "worker"]
    (cache,) = [m for m in server(manifests)["volumeMounts"] if m["mountPath"] == "/cache"]
    assert (cache["name"], cache["subPath"]) == ("models", "cache/0123456789ab")


@pytest.mark.parametrize("name", ["qwen3-8b-one-b200", "gpt-oss-120b-one-b300"])
def test_the_examples_are_the_smallest_values_and_render(name: str) -> None:
    text = (ROOT / "examples" / "helm" / f"{name}.yaml").read_text()
    assert server(render(yaml.safe_load(text)))["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert len(text.splitlines()) < 20


def test_argo_cd_and_flux_install_what_the_smallest_example_does() -> None:
    """Flux waits longer than the Jobs that come first."""
    folder = ROOT / "examples" / "helm"
    wanted = yaml.safe_load((folder / "qwen3-8b-one-b200.yaml").read_text())
    argo = yaml.safe_load((folder / "argo-cd.yaml").read_text())["spec"]["source"]
    repository, flux = yaml.safe_load_all((folder / "flux.yaml").read_text())
    assert argo["helm"]["valuesObject"] == flux["spec"]["values"] == wanted
    assert f"oci://{argo['repoURL']}/{argo['chart']}" == repository["spec"]["url"]
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    seconds = defaults["models"]["download"]["deadlineSeconds"] + defaults["build"]["deadlineSeconds"]
    assert int(flux["spec"]["timeout"].removesuffix("h")) * 3600 > seconds
