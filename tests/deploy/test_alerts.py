"""Alerts fire when they should and are silent when they should: Prometheus' own promtool plays the time. The gates of a
new drafter are asked by `helm test` and again and again by a CronJob, and a failure is an alert.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_serve.adapter.registry import backend
from tests.support.chart import BACKENDS, ROOT, Manifest, of_kind, only, pods, recipe_deployment, render, values
from tests.support.debian import promtool

RUNBOOK = (ROOT / "docs" / "alerts.md").read_text()
LABELS = 'namespace="serving", app_kubernetes_io_instance="trial"'


GATES = {
    "verify": {"enabled": True, "without": "http://plain.serving", "schedule": "0 3 * * *"},
    "acceptance": {"atLeast": 2.9, "schedule": "0 * * * *"},
}


def watched(name: str, **gates: Manifest) -> list[Manifest]:
    given = values(name, recipe_deployment("qwen3-8b-b200"), alerts={"enabled": True}, podMonitor={"enabled": True})
    given |= {"tests": gates, "networkPolicy": {"namespaces": ["monitoring"]}}
    given["models"] = {"kind": "claim", "claim": "weights", "download": {"enabled": True}}
    return render(given)


@pytest.fixture(scope="module")
def every() -> dict[str, Manifest]:
    return {name: only(watched(name, **GATES), "PrometheusRule")["spec"] for name in BACKENDS}


def test_promtool_takes_every_rule_and_each_has_its_page(every: dict[str, Manifest], tmp_path: Path) -> None:
    for name, spec in every.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(spec))
        for rule in spec["groups"][0]["rules"]:
            assert rule["annotations"]["runbook"] == f"docs/alerts.md#{rule['alert'].lower()}"
            assert f"\n## {rule['alert']}\n" in RUNBOOK
    argv = [str(promtool()), "check", "rules", *map(str, tmp_path.glob("*.yaml"))]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_engine_is_watched_by_names_of_its_own(every: dict[str, Manifest]) -> None:
    for name, spec in every.items():
        metrics = backend(name).facts.metrics
        rules = {rule["alert"]: rule["expr"] for rule in spec["groups"][0]["rules"]}
        assert f"{metrics.queue_time}_bucket" in rules["DFlashQueueOld"]
        assert {"DFlashAcceptanceLow", "DFlashDrafterDoesNotFit", "DFlashNotReady", "DFlashRestarts"} <= rules.keys()
        assert ("DFlashDraftsNothing" in rules) == (name != "tensorrt-llm")  # it reports no widths
        assert not [expression for expression in rules.values() if re.search(r"\$\w", expression)]


def series(metric: str, values_: str, labels: str = "") -> dict[str, str]:
    return {"series": f'{metric}{{{LABELS}, pod="a"{labels}}}', "values": values_}


STEPS, ACCEPTED, OFFERED = (f"dflash_serve:{name}_total" for name in ("steps", "slots_accepted", "slots_offered"))
GENERATED = "sglang:generation_tokens_total"
READY = 'kube_pod_status_ready{condition="true", namespace="serving", pod="trial-dflash-serve-%s"}'
JOB = 'kube_job_status_failed{namespace="serving", job_name="trial-dflash-serve-%s"}'
GOOD = [
    series(STEPS, "0+100x240", ', width="8"'),
    series(ACCEPTED, "0+80x240", ', slot="1"'),
    series(ACCEPTED, "0+70x240", ', slot="2"'),
    series(OFFERED, "0+100x240", ', slot="1"'),
    series(OFFERED, "0+100x240", ', slot="2"'),
    series(GENERATED, "0+250x240"),
    {"series": READY % "7d9c-x1", "values": "1x240"},
    *({"series": READY % f"{name}-x1", "values": "0x240"} for name in ("build", "certify")),  # pods of Jobs, ended
]
BAD = [
    series(STEPS, "0+100x240", ', width="8"'),
    series(ACCEPTED, "0+10x240", ', slot="1"'),
    series(OFFERED, "0+100x240", ', slot="1"'),
    series(GENERATED, "0+110x240"),
    {"series": READY % "7d9c-x1", "values": "0x240"},
]
QUEUE = "sglang:queue_time_seconds_bucket"
WAITING = [
    *(series(QUEUE, "0+10x240", f', le="{bound}"') for bound in ("1", "10")),  # nine of ten wait longer
    *(series(QUEUE, "0+100x240", f', le="{bound}"') for bound in ("60", "+Inf")),
]
RESTARTS = "kube_pod_container_status_restarts_total"
CONTAINER = 'container="server", namespace="serving", pod="trial-dflash-serve-7d9c-x1"'
RESTARTED = [{"series": f"{RESTARTS}{{{CONTAINER}}}", "values": "0x100 1 2 2x138"}]
JOBS = ("build", "certify", "verify-29384", "acceptance-29384")
FAILED = {name: [{"series": JOB % name, "values": "1x240"}] for name in JOBS}
IDLE_DRAFTER = [series(STEPS, "0+100x240", ', width="1"'), series(GENERATED, "0+100x240")]


@pytest.mark.parametrize(
    ("played", "firing"),
    [
        (GOOD, set()),
        (BAD, {"DFlashAcceptanceLow", "DFlashDrafterDoesNotFit", "DFlashNotReady"}),
        (IDLE_DRAFTER, {"DFlashDraftsNothing"}),
        (WAITING, {"DFlashQueueOld"}),
        (RESTARTED, {"DFlashRestarts"}),
        (FAILED["build"], {"DFlashJobFailed"}),
        (FAILED["certify"], {"DFlashJobFailed"}),
        (FAILED["verify-29384"], {"DFlashGateFailed"}),
        (FAILED["acceptance-29384"], {"DFlashGateFailed"}),
    ],
    ids=[
        "good",
        "bad",
        "idle",
        "waiting",
        "restarted",
        "build failed",
        "refused",
        "verify failed",
        "acceptance failed",
    ],
)
def test_what_fires_in_two_hours(
    played: list[dict[str, str]], firing: set[str], every: dict[str, Manifest], tmp_path: Path
) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(every["sglang"]))
    alerts = [rule["alert"] for rule in every["sglang"]["groups"][0]["rules"]]
    fired = {name for name in alerts if _fires(name, played, tmp_path)}
    assert fired == firing


def _fires(alert: str, played: list[dict[str, str]], folder: Path) -> bool:
    """promtool is told that it does not, and contradicts or does not."""
    quiet: dict[str, Any] = {"eval_time": "2h", "alertname": alert, "exp_alerts": []}
    test = {"interval": "1m", "input_series": played, "alert_rule_test": [quiet]}
    (folder / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [test]}))
    argv = [str(promtool()), "test", "rules", "test.yaml"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "exp:[" in done.stdout + done.stderr, done.stdout + done.stderr
    return done.returncode != 0


@pytest.mark.parametrize("name", GATES)
def test_a_cron_job_asks_what_helm_test_asks(name: str) -> None:
    manifests = watched("sglang", **{name: GATES[name]})
    job = only(manifests, "CronJob")
    assert job["metadata"]["name"] == f"trial-dflash-serve-{name}"
    assert (job["spec"]["schedule"], job["spec"]["concurrencyPolicy"]) == (GATES[name]["schedule"], "Forbid")
    assert job["spec"]["jobTemplate"]["spec"]["backoffLimit"] == 0
    (tested,) = [pod for label, pod in pods(manifests) if label == f"Pod trial-dflash-serve-test-{name}"]
    asking = job["spec"]["jobTemplate"]["spec"]["template"]
    assert asking["spec"] == tested["spec"]
    assert asking["metadata"]["labels"]["app.kubernetes.io/component"] == "test"  # or the network policy shuts it in
    assert of_kind(watched("sglang", **{name: {**GATES[name], "schedule": ""}}), "CronJob") == []
