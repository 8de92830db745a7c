"""The gates of a new drafter: what `helm test` asks once, a CronJob asks again and again, and a failure is told."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.chart import Manifest, of_kind, only, pods, recipe_deployment, render, values
from tests.support.debian import promtool

GATES = {
    "verify": {"enabled": True, "without": "http://plain.serving", "schedule": "0 3 * * *"},
    "acceptance": {"atLeast": 2.9, "schedule": "0 * * * *"},
}
FAILED = 'kube_job_status_failed{namespace="serving", job_name="trial-dflash-serve-%s"}'


def gated(**gates: Manifest) -> list[Manifest]:
    given = values("sglang", recipe_deployment("qwen3-8b-b200"), tests=gates, alerts={"enabled": True})
    given.update(podMonitor={"enabled": True}, networkPolicy={"namespaces": ["monitoring"]})
    return render(given)


@pytest.mark.parametrize("name", GATES)
def test_a_cron_job_asks_what_helm_test_asks(name: str) -> None:
    manifests = gated(**{name: GATES[name]})
    job = only(manifests, "CronJob")
    assert job["metadata"]["name"] == f"trial-dflash-serve-{name}"
    assert (job["spec"]["schedule"], job["spec"]["concurrencyPolicy"]) == (GATES[name]["schedule"], "Forbid")
    assert job["spec"]["jobTemplate"]["spec"]["backoffLimit"] == 0
    (tested,) = [pod for label, pod in pods(manifests) if label == f"Pod trial-dflash-serve-test-{name}"]
    asking = job["spec"]["jobTemplate"]["spec"]["template"]
    assert asking["spec"] == tested["spec"]
    assert asking["metadata"]["labels"]["app.kubernetes.io/component"] == "test"  # or the network policy shuts it in


def test_both_gates_stand_side_by_side_and_without_a_schedule_there_is_no_cron_job() -> None:
    assert len(of_kind(gated(**GATES), "CronJob")) == 2
    unscheduled = {
        name: {key: value for key, value in gate.items() if key != "schedule"} for name, gate in GATES.items()
    }
    assert of_kind(gated(**unscheduled), "CronJob") == []


@pytest.mark.parametrize(
    ("job", "fires"), [("acceptance-29384", True), ("verify-29384", True), ("build", False), ("download", False)]
)
def test_a_gate_that_failed_is_told(job: str, fires: bool, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(only(gated(**GATES), "PrometheusRule")["spec"]))
    played = [{"series": FAILED % job, "values": "1x10"}]
    quiet = {"eval_time": "5m", "alertname": "DFlashGateFailed", "exp_alerts": []}
    case = {"interval": "1m", "input_series": played, "alert_rule_test": [quiet]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [case]}))
    argv = [str(promtool()), "test", "rules", "test.yaml"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert ("exp:[" in said) == fires, said
    assert (done.returncode != 0) == fires, said
