"""What a tag would publish: the workflow is well formed, pins what it runs, and forgets no image."""

from __future__ import annotations

import re
import subprocess
import sys

import yaml

from tests.support.chart import ROOT

FILE = ROOT / ".github" / "workflows" / "release.yaml"
WORKFLOW = yaml.safe_load(FILE.read_text())


def test_it_is_a_workflow() -> None:
    argv = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(FILE)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_runs_nothing_that_can_move_and_has_no_right_that_it_does_not_name() -> None:
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    used = [step["uses"] for step in steps if "uses" in step]
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", action)] == []
    assert WORKFLOW["permissions"] == {}
    assert all("permissions" in job for job in WORKFLOW["jobs"].values())
    # What a tag's name could inject goes through the environment.
    assert [step["run"] for step in steps if "${{" in step.get("run", "")] == []


def test_it_builds_signs_and_describes_every_image_for_both_architectures() -> None:
    job = WORKFLOW["jobs"]["images"]
    built = {entry["image"] for entry in job["strategy"]["matrix"]["include"]}
    assert built == {path.stem for path in (ROOT / "deploy" / "docker").glob("*.Dockerfile")}
    (build,) = [step["with"] for step in job["steps"] if step.get("id") == "build"]
    assert build["platforms"] == "linux/amd64,linux/arm64"
    assert (build["sbom"], build["provenance"]) == (True, "mode=max")
    for name in ("images", "chart"):
        assert any("cosign sign" in step.get("run", "") for step in WORKFLOW["jobs"][name]["steps"])
