"""`plan --calibrate` finds the constants that a sweep was made with, and says how far each of its points is off."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.deployment.gpus import GPUS
from dflash_serve.errors import UserError
from dflash_serve.planning.prediction import Load, Predictor, constants_of
from dflash_serve.planning.step_times import Roofline, Split
from tests.support.golden_deployments import hub
from tests.support.planned import planned_pair
from tests.unit.planning.test_plan import LENGTH, PAIR, by_roofline, plan

__all__ = ["by_roofline", "hub"]
pytestmark = pytest.mark.usefixtures("hub")
TRUTH = {"plain_step": 1.4, "plain_request": 0.03, "speculative_step": 3.1, "speculative_request": 0.05}
WORDS = (*PAIR, *LENGTH, "--gpu", "b200", "--isl", "1024", "--osl", "256")


@pytest.fixture
def report(tmp_path: Path) -> dict[str, Any]:
    """A report of `bench` whose figures the model itself predicts from the true constants."""
    constants = constants_of("sglang", None).model_copy(update=TRUTH)
    times = Roofline(planned_pair(tmp_path / "target"), GPUS["b200"], Split())
    truth = Predictor(times, constants, Load(1024, 256), 16)
    points = [
        {
            "variant": variant,
            "concurrency": users,
            "interactivity": truth.point("", users, width, tau).interactivity,
            "acceptance": {"acceptance_length": None if width == 1 else tau},
        }
        for users in (1, 4, 16, 64)
        for variant, width, tau in (("off", 1, 1.0), ("fixed 16", 16, 6.0), ("auto", 9, 5.0))
    ]
    return {"points": points, "served": {"Target": "Qwen/Qwen3-8B"}}


def test_the_constants_of_the_sweep_are_found_and_can_be_used_again(report: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(report))
    done = plan(tmp_path / "a", *WORDS, "--calibrate", str(path))
    assert done.exception is None, done.exception
    told = json.loads((tmp_path / "a" / "plan.json").read_text())
    for name, value in TRUTH.items():
        assert told["constants"][name] == pytest.approx(value, rel=0.02, abs=0.002), name
    assert [f"calibrated: {line}" for line in told["calibration"]] == re.findall("^calibrated: .*$", done.stdout, re.M)
    assert sum("not used: auto" in line for line in told["calibration"]) == 4
    assert all(re.search(r"measured .* predicted .* \([+-]0%\)$", line) for line in told["calibration"][:8])
    again = plan(tmp_path / "b", *WORDS, "--constants", str(tmp_path / "a" / "constants.json"))
    assert again.exception is None, again.exception
    assert json.loads((tmp_path / "b" / "plan.json").read_text())["chosen"] == told["chosen"]
    report["points"][7]["interactivity"] *= 0.5  # fixed 16 at 16 users
    path.write_text(json.dumps(report))
    assert re.search(
        r"fixed 16, 16 users: measured .* \(\+\d\d%\)", plan(tmp_path, *WORDS, "--calibrate", str(path)).stdout
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"served": {"Target": "other"}}, "it measured other, the plan is for Qwen/Qwen3-8B"),
        ({"points": []}, "0 usable points without speculation and 0 with"),
        ({"points": [{}]}, "no report of `bench`"),
        ({"served": []}, "no report of `bench`"),
        ({"environment": {"hardware": "8 x NVIDIA H200"}}, "it was measured on 8 x NVIDIA H200, the plan is for b200"),
        ({"environment": {"hardware": "one RTX 5090 of mine"}}, "it was measured on one RTX 5090 of mine, the plan"),
        (
            {"environment": {"hardware": "2 cores of a CPU"}},
            "measured on 2 cores of a CPU, the plan is for b200",
        ),
        ({"served": {"Variants": "off, fixed 16; engine: vLLM"}}, "it measured vLLM, the plan is for SGLang"),
    ],
)
def test_another_report_is_refused(report: dict[str, Any], changes: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(report | changes))
    error = plan(tmp_path / "out", *WORDS, "--calibrate", str(path)).exception
    assert isinstance(error, UserError)
    assert said in str(error)
    assert not (tmp_path / "out").exists()


def test_a_report_without_a_gpu_must_come_near(report: dict[str, Any], tmp_path: Path) -> None:
    """No constants make the model's GPU as fast as these points, which are another's."""
    path = tmp_path / "bench.json"
    for point in report["points"]:
        point["interactivity"] *= 20
    path.write_text(json.dumps(report))
    error = str(plan(tmp_path / "out", *WORDS, "--calibrate", str(path)).exception)
    assert re.search(r"it does not tell its GPU, and no constants come nearer to its points than \d\d%", error)
    named = {"served": {"Variants": "off; engine: SGLang with dflash-serve"}, "environment": {"hardware": "1 x B200"}}
    path.write_text(json.dumps(report | named))
    assert plan(tmp_path / "out", *WORDS, "--calibrate", str(path)).exception is None, "its user said so"


def test_constants_of_another_engine_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(constants_of("vllm", None).model_dump_json())
    error = str(plan(tmp_path / "out", *WORDS, "--constants", str(path)).exception)
    assert "constants of vllm, and the plan is for sglang; give those of sglang, or --backend vllm" in error
    assert plan(tmp_path / "out", *WORDS, "--constants", str(path), "--backend", "vllm").exception is None
