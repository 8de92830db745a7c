"""The written result of `python -m benchmarks.plan_published` is within its goals, and gave the constants that ship."""

from __future__ import annotations

import json
import re
from statistics import mean
from typing import Any

import pytest

from dflash_serve.deployment.gpus import GPUS
from dflash_serve.planning.plan import FITTED_ON, OTHER_GPU_ERROR, ROOFLINE_ERROR, shown_error
from dflash_serve.planning.prediction import Constants, constants_of
from tests.house import ROOT

RESULT: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "plan-published.json").read_text())


def test_the_constants_are_those_that_the_named_rows_gave() -> None:
    shipped = constants_of("sglang", "sglang-spec-v1")
    for name, value in RESULT["constants"].items():
        assert getattr(shipped, name) == pytest.approx(value, abs=0.001)
    other = constants_of("tensorrt-llm", None)
    assert other.scale == pytest.approx(RESULT["plain_curve"]["scale"], abs=0.001)
    assert other.plain_step == pytest.approx(RESULT["plain_curve"]["plain_step"], abs=0.001)


def test_errors_are_within_the_goals_in_sample_and_held_out() -> None:
    lines = RESULT["lines"]
    inside = [abs(line["speedup_error"]) for line in lines if not line["held_out"]]
    outside = [abs(line["speedup_error"]) for line in lines if line["held_out"]]
    assert (len(inside), len(outside)) == (50, 39)
    assert mean(inside) <= 0.10
    assert mean(outside) <= 0.13
    assert RESULT["plain_curve"]["points"] == 49
    assert RESULT["plain_curve"]["raw_mean_error"] <= 0.10


def test_no_error_that_a_plan_shows_is_smaller_than_what_was_found() -> None:
    found = RESULT["held_out"]["speedup"]["mean_error"]
    assert RESULT["roofline"]["constants_of_the_tables"]["base"]["mean_error"] <= ROOFLINE_ERROR
    for name in ("sglang-spec-v1", "sglang-spec-v2"):
        assert constants_of("sglang", name).error >= round(found, 2)
    assert constants_of("vllm", None).error >= round(RESULT["groups"]["another engine"]["dflash"]["mean_error"], 2)


def test_chains_are_foreseen_about_as_well_as_drafters_of_a_block() -> None:
    found = RESULT["chains"]
    assert Constants.model_fields["chain_pass"].default == pytest.approx(found["chain_pass"], abs=0.001)
    groups = found["groups"]
    assert groups["EAGLE-3, fitted"]["speedup"]["cells"] == 15
    assert groups["EAGLE-3, fitted"]["speedup"]["mean_error"] <= 0.12
    assert groups["MTP"]["speedup"]["cells"] == 9
    assert groups["MTP"]["speedup"]["mean_error"] <= 0.13
    assert groups["EAGLE-3, another target"]["dflash"]["mean_error"] <= 0.30, "one cell, which docs/planning.md names"


def test_a_plan_tells_the_mean_error_found_on_gpus_that_no_fit_has_seen() -> None:
    """One cell may be further off; the page of planning quotes them all."""
    page = (ROOT / "docs" / "planning.md").read_text()
    for basis, what in (("operator tables", "by tables"), ("roofline", "by the roofline")):
        lines = [line for line in RESULT["gpus"] if line["basis"].startswith(basis)]
        errors = [abs(line["error"]) for line in lines]
        for line in lines:
            constants, on, by_hand = constants_of(line["engine"], None), GPUS[line["gpu"]], basis == "roofline"
            assert mean(errors) <= shown_error(constants, on, line["width"], by_hand=by_hand)
        assert re.search(rf"{mean(errors):.0%} of {len(errors)}( cells)? {what}".replace("%", " %"), page)
    assert f"{OTHER_GPU_ERROR:.0%}".replace("%", " %") in page
    kinds = ("No", "One", "Two", "Three", "Four", "Five", "Six")[len({line["gpu"] for line in RESULT["gpus"]})]
    assert f"{kinds} kinds of GPUs that no fit has seen" in (ROOT / "docs" / "benchmarks.md").read_text()


def test_the_gpu_of_the_fits_and_a_calibrated_plan_keep_their_own_error() -> None:
    fitted = constants_of("sglang", None)
    own = fitted.plain_error
    assert shown_error(fitted, GPUS[FITTED_ON], 1, by_hand=False) == own < OTHER_GPU_ERROR
    calibrated = fitted.model_copy(update={"evidence": "calibrated"})
    assert shown_error(calibrated, GPUS["h200"], 1, by_hand=False) == own
