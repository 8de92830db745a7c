"""Every installation is accepted by helm, Kubernetes, the operators' definitions and two linters; golden files.

`golden/ENGINE.values.yaml` is what `deploy --render helm` makes of examples/deployments; `golden/ENGINE.manifests.yaml`
is what the chart makes of one installation; `sglang-pair.*` are the objects of a pair in the chart, and its graph for
Dynamo. After a wanted change: GOLDEN=write make test-deploy, and read the difference. The newest Kubernetes is tried;
with DFLASH_SERVE_TEST_DEPLOY=all every one from 1.30 on.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dflash_serve.cli.main import app
from tests.support.chart import (
    BACKENDS,
    CASES,
    CHART,
    DIGEST,
    EVERYTHING,
    HELMS,
    INSTALLATIONS,
    ROOT,
    Manifest,
    case,
    check_golden,
    lint,
    notes,
    of_kind,
    only,
    pods,
    recipe_deployment,
    render,
    values,
)
from tests.support.offline_hub import offline_hub

HERE = Path(__file__).parent
INSTALLED = {
    "torch": "torch-on-a-cpu",
    "sglang": "sglang-in-one-nvlink-domain",
    "tensorrt-llm": "tensorrt-llm-with-a-built-drafter",
    "vllm": "vllm",
}
VERSIONS = [f"1.{minor}" for minor in (range(30, 38) if EVERYTHING else (37,))]
CUSTOM = {path.stem for path in (HERE / "schemas").glob("*.json")}
LATER = {
    "sglang-from-a-model-image": ("1.31", "'image' was unexpected"),
    "sglang-in-one-nvlink-domain": ("1.31", "'resourceClaimTemplateName' was unexpected"),
}
"""Installations whose pods an older Kubernetes refuses: the first release that accepts them, and the message."""
YAMLLINT = """
extends: default
rules:
  braces: {max-spaces-inside: 0}
  comments: {min-spaces-from-content: 1}
  document-start: disable
  line-length: {max: 130}
"""
PROBES = {"CKV_K8S_8": "liveness", "CKV_K8S_9": "readiness"}
LOOSENED = {
    "CKV_K8S_25": ("a capability", ("Deployment", "Pod", "worker")),
    "CKV_K8S_31": ("a seccomp profile of the nodes", ("Deployment", "Pod", "worker")),
    "CKV_K8S_35": ("a variable out of a Secret", ("Deployment", "Job", "worker")),
    "CKV_K8S_40": ("the namespace's own user", ("Deployment", "Job", "Pod", "worker")),
}
ARGUED = {
    **{(check, "Pod"): f"a test asks once and ends: it has no {probe} to ask for" for check, probe in PROBES.items()},
    **{
        (check, "worker"): f"a worker has no server; its leader's {probe} probe is the group's"
        for check, probe in PROBES.items()
    },
    **{
        ("CKV_K8S_11", kind): "a CPU limit stops an engine's threads, and its GPUs wait"
        for kind in ("Deployment", "Job", "worker")
    },
    ("CKV_K8S_38", "Deployment"): "a pair's router watches the pods of its halves",
    **{
        (check, kind): f"one installation's values ask for {what}"
        for check, (what, kinds) in LOOSENED.items()
        for kind in kinds
    },
}
"""checkov's findings that stay: (check, what it is about) -> why. Its open version knows no severities: all count."""

jsonschema: Any = import_module("jsonschema")
kubernetes_validate: Any = import_module("kubernetes_validate.utils")
# It reads megabytes of definitions again for every object: 10 ms each, 1 ms with this.
kubernetes_validate.schema_contents = cache(kubernetes_validate.schema_contents)


@pytest.mark.parametrize("backend", BACKENDS)
def test_deploy_writes_these_values(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline_hub(tmp_path, monkeypatch)
    file, image = ROOT / "examples" / "deployments" / f"{backend}.yaml", f"registry.example/{backend}@{DIGEST}"
    words = ["deploy", str(file), "--render", "helm", "--backend", backend, "--image", image]
    result = CliRunner().invoke(app, words)
    assert result.exception is None
    check_golden(f"{backend}.values", [yaml.safe_load(result.stdout)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_chart_makes_these_manifests(backend: str) -> None:
    for layer in HELMS:
        shown = [shortened(document) for document in render(case(INSTALLED[backend]), layer)]
        check_golden(f"{backend}.manifests", shown)


def shortened(document: Manifest) -> Manifest:
    """The document without the text of scripts and dashboards, and without the digest of them."""
    shown = without_digest(document)
    if document["kind"] == "ConfigMap":
        data = {name: "" if name.endswith((".py", ".json")) else text for name, text in document["data"].items()}
        shown["data"] = data
    return shown


def without_digest(node: Manifest) -> Manifest:
    return {
        key: "" if key == "dflash-serve/config" else without_digest(value) if isinstance(value, dict) else value
        for key, value in node.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_helm_lints_it_and_kubernetes_takes_every_field(name: str) -> None:
    for layer in HELMS:
        assert lint(case(name), layer) == ""
    for version in VERSIONS:
        first, words = LATER.get(name, (version, ""))
        if version < first:
            with pytest.raises(kubernetes_validate.ValidationError, match=words):
                validate(render(case(name)), version)
        else:
            validate(render(case(name)), version)


def validate(manifests: list[Manifest], version: str) -> None:
    """Raises a ValidationError that names the field."""
    for manifest in manifests:
        kind = manifest["kind"].lower()
        if kind in CUSTOM:
            jsonschema.validate(manifest, json.loads((HERE / "schemas" / f"{kind}.json").read_text()))
        else:
            kubernetes_validate.validate(manifest, version, strict=True)
    for _, pod in pods(of_kind(manifests, "LeaderWorkerSet")):
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": pod}
        kubernetes_validate.validate(template, version, strict=True)


def test_all_kinds_are_among_them() -> None:
    kinds = {manifest["kind"] for name in CASES for manifest in render(case(name))}
    assert {kind.lower() for kind in kinds} >= CUSTOM
    assert kinds >= {"CronJob", "Deployment", "HorizontalPodAutoscaler", "Job", "PersistentVolumeClaim"}


def test_yamllint_finds_nothing_in_the_charts_own_files() -> None:
    files = [CHART / "Chart.yaml", CHART / "values.yaml", *INSTALLATIONS.glob("*.yaml")]
    argv: list[str | Path] = [sys.executable, "-m", "yamllint", "--strict", "--config-data", YAMLLINT, *files]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.thorough
def test_checkov_finds_nothing_that_is_not_argued(tmp_path: Path) -> None:
    """No root, no writable root file system, no privilege, no service account's token, requests and limits, digests."""
    checkov = os.environ.get("CHECKOV")
    if checkov is None:
        pytest.fail("CHECKOV does not say where checkov is; run `make test-deploy`")
    for name in CASES:
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump_all(visible(render(case(name)))))
    argv = [checkov, "--directory", str(tmp_path), "--framework", "kubernetes", "--skip-download", "--quiet"]
    done = subprocess.run([*argv, "--output", "json"], capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    found = {(finding["check_id"], about(finding["resource"])) for finding in report["results"]["failed_checks"]}
    assert found == set(ARGUED)
    assert report["summary"]["passed"] > 1000
    assert report["summary"]["parsing_errors"] == 0


def visible(manifests: list[Manifest]) -> list[Manifest]:
    """checkov knows no LeaderWorkerSet: its pods are shown to it as Deployments."""
    shown = [manifest for manifest in manifests if manifest["kind"] != "LeaderWorkerSet"]
    for label, pod in pods(of_kind(manifests, "LeaderWorkerSet")):
        name = "worker" if "workerTemplate" in label else "leader"
        spec = {"selector": {"matchLabels": pod["metadata"]["labels"]}, "template": pod}
        metadata = {"name": name, "namespace": "serving"}
        shown.append({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})
    return shown


def about(resource: str) -> str:
    """`Deployment.serving.worker (container 0)` -> worker; other resources -> their kind."""
    kind, *rest = resource.split(".")
    return "worker" if kind == "Deployment" and rest and rest[-1].startswith("worker") else kind


def test_the_notes_say_what_to_do_next() -> None:
    text = notes(case("tensorrt-llm-with-a-built-drafter"))
    assert "Qwen/Qwen3-8B on tensorrt-llm, with speculation" in text
    assert re.search(r"The build \w{12} is there", text)
    assert "helm -n serving test trial" in text
    assert "deployment.target.revision is not set" in text
    assert "revision is not set" not in (without_keys := notes(case("sglang")))
    keys = '-H "Authorization: Bearer $KEY"'
    assert (keys in notes(case("torch-on-a-cpu")), keys in without_keys) == (True, False)


def test_the_documented_example_of_scaling_by_headroom_is_what_the_chart_renders() -> None:
    given = values("sglang", recipe_deployment("qwen3-8b-b200"), podMonitor={"enabled": True})
    given |= {"networkPolicy": {"namespaces": ["monitoring"]}}
    address = "http://prometheus.monitoring:9090"
    given["autoscaling"] = {"kind": "keda", "headroom": 0.8, "prometheusAddress": address}
    manifests = render(given)
    validate(manifests, VERSIONS[-1])
    documented = re.search(r"```yaml\n(apiVersion: keda.*?)```", (ROOT / "docs" / "alerts.md").read_text(), re.DOTALL)
    assert documented is not None
    example = yaml.safe_load(documented[1])
    validate([example], VERSIONS[-1])
    *_, headroom = only(manifests, "ScaledObject")["spec"]["triggers"]
    (trigger,) = example["spec"]["triggers"]
    where = '{namespace="serving", app_kubernetes_io_instance="trial"}'
    headroom["metadata"]["query"] = headroom["metadata"]["query"].replace(where, "")
    trigger["metadata"]["query"] = trigger["metadata"]["query"].strip()
    assert headroom == trigger
