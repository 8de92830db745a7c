"""The chart's own files and what it renders, before two linters that platform teams run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.chart import CASES, CHART, INSTALLATIONS, Manifest, case, pods, render

YAMLLINT = """
extends: default
rules:
  braces: {max-spaces-inside: 0}
  comments: {min-spaces-from-content: 1}
  document-start: disable
  line-length: {max: 130}
"""
PROBES = {"CKV_K8S_8": "liveness", "CKV_K8S_9": "readiness"}
LIMITLESS = ("Deployment", "Job", "worker")
LOOSENED = {
    "CKV_K8S_25": ("a capability", ("Deployment", "Pod", "worker")),
    "CKV_K8S_31": ("a seccomp profile of the nodes", ("Deployment", "Pod", "worker")),
    "CKV_K8S_35": ("a variable out of a Secret", ("Deployment", "worker")),
    "CKV_K8S_40": ("the namespace's own user", ("Deployment", "Job", "Pod", "worker")),
}
ARGUED = {
    **{(check, "Pod"): f"a test asks once and ends: it has no {probe} to ask for" for check, probe in PROBES.items()},
    **{
        (check, "worker"): f"a worker has no server; its leader's {probe} probe is the group's"
        for check, probe in PROBES.items()
    },
    **{("CKV_K8S_11", kind): "a CPU limit stops an engine's threads, and its GPUs wait" for kind in LIMITLESS},
    **{
        (check, kind): f"one installation's values ask for {what}"
        for check, (what, kinds) in LOOSENED.items()
        for kind in kinds
    },
}
"""checkov's findings that stay: (check, what it is about) -> why. Its open version knows no severities: all count."""


def test_its_yaml_is_tidy() -> None:
    files = [CHART / "Chart.yaml", CHART / "values.yaml", *INSTALLATIONS.glob("*.yaml")]
    argv: list[str | Path] = [sys.executable, "-m", "yamllint", "--strict", "--config-data", YAMLLINT, *files]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def visible(manifests: list[Manifest]) -> list[Manifest]:
    """checkov knows no LeaderWorkerSet: its pods are shown to it as Deployments."""
    shown = [manifest for manifest in manifests if manifest["kind"] != "LeaderWorkerSet"]
    for label, pod in pods([manifest for manifest in manifests if manifest["kind"] == "LeaderWorkerSet"]):
        name = "worker" if "workerTemplate" in label else "leader"
        spec = {"selector": {"matchLabels": pod["metadata"]["labels"]}, "template": pod}
        metadata = {"name": name, "namespace": "serving"}
        shown.append({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})
    return shown


def test_checkov_finds_nothing_that_is_not_argued(tmp_path: Path) -> None:
    checkov = os.environ.get("CHECKOV")
    if checkov is None:
        pytest.fail("CHECKOV does not say where checkov is; run `make test-deploy`")
    for name in CASES:
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump_all(visible(render(case(name)))))
    argv: list[str | Path] = [
        checkov,
        "--directory",
        tmp_path,
        "--framework",
        "kubernetes",
        "--skip-download",
        "--quiet",
        "--output",
        "json",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    found = {(finding["check_id"], about(finding["resource"])) for finding in report["results"]["failed_checks"]}
    assert found == set(ARGUED)
    assert report["summary"]["passed"] > 1000
    assert report["summary"]["parsing_errors"] == 0


def about(resource: str) -> str:
    """`Deployment.serving.worker (container 0)` -> worker; other resources -> their kind."""
    kind, *rest = resource.split(".")
    return "worker" if kind == "Deployment" and rest and rest[-1].startswith("worker") else kind
