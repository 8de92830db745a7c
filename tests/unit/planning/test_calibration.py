"""Calibration finds the constants that a sweep was made with, and says how far each point is off."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.errors import UserError
from dflash_serve.planning.prediction import ALL, Load, Predictor, calibrate
from dflash_serve.planning.step_times import SPECIFICATIONS, Roofline, Split, constants_of
from tests.house import ROOT
from tests.support.planned import planned_pair

TRUTH = {"plain_step": 1.4, "plain_request": 0.03, "speculative_step": 3.1, "speculative_request": 0.05}


@pytest.fixture
def predictor(tmp_path: Path) -> Predictor:
    times = Roofline(planned_pair(tmp_path / "target"), SPECIFICATIONS["b200"], Split())
    return Predictor(times, constants_of("sglang", None), Load(1024, 256), 16)


def report_of(predictor: Predictor, folder: Path, **more: Any) -> Path:
    """What a bench of an engine with the true constants would report: a sweep made of the model itself."""
    truth = replace(predictor, constants=predictor.constants.model_copy(update=TRUTH))
    points = []
    for users in (1, 4, 16, 64):
        for variant, width, tau in (("off", 1, 1.0), ("fixed 16", 16, 6.0), ("auto", 9, 5.0)):
            seen = truth.point("", users, width, tau).interactivity
            told = {"acceptance_length": None if width == 1 else tau}
            points.append({"variant": variant, "concurrency": users, "interactivity": seen, "acceptance": told})
    path = folder / "bench.json"
    path.write_text(json.dumps({"points": points, "served": {"Target": "Qwen/Qwen3-8B"}, **more}))
    return path


def test_it_finds_the_constants_that_the_sweep_was_made_with(predictor: Predictor, tmp_path: Path) -> None:
    found = calibrate(report_of(predictor, tmp_path), predictor, "Qwen/Qwen3-8B")
    for name in ALL:
        assert getattr(found.constants, name) == pytest.approx(TRUTH[name], rel=0.02, abs=0.002)
    assert found.constants.evidence == "calibrated"
    assert len(found.cells) == 8
    assert sum("not used: auto" in line for line in found.lines()) == 4
    assert all("(+0%)" in line or "(-0%)" in line for line in found.lines()[:8])


def test_a_point_that_does_not_fit_is_shown_as_off(predictor: Predictor, tmp_path: Path) -> None:
    path = report_of(predictor, tmp_path)
    report = json.loads(path.read_text())
    spoilt = next(p for p in report["points"] if p["variant"] == "fixed 16" and p["concurrency"] == 16)
    spoilt["interactivity"] *= 0.5
    path.write_text(json.dumps(report))
    found = calibrate(path, predictor, "Qwen/Qwen3-8B")
    worst = max(found.cells, key=lambda cell: abs(cell.error(found.constants)))
    assert worst.label == "fixed 16, 16 users"
    assert worst.error(found.constants) > 0.5
    assert found.constants.error > found.constants.plain_error


def test_a_sweep_of_another_target_or_without_a_baseline_is_refused(predictor: Predictor, tmp_path: Path) -> None:
    path = report_of(predictor, tmp_path)
    with pytest.raises(UserError, match="it measured Qwen/Qwen3-8B, the plan is for other"):
        calibrate(path, predictor, "other")
    report = json.loads(path.read_text())
    report["points"] = [point for point in report["points"] if point["variant"] != "off"]
    path.write_text(json.dumps(report))
    with pytest.raises(UserError, match="0 usable points without speculation and 4 with"):
        calibrate(path, predictor, "Qwen/Qwen3-8B")


def test_a_real_report_of_bench_is_read(predictor: Predictor) -> None:
    """Of two CPU cores, so the constants mean nothing here: every point of off and fixed is used."""
    path = ROOT / "benchmarks" / "results" / "serving-vllm-2core" / "bench.json"
    found = calibrate(path, predictor, "smollm2")
    steady = [point for point in json.loads(path.read_text())["points"] if point["variant"] != "auto"]
    assert len(found.cells) == len(steady) > 8


def test_copies_of_one_server_share_its_users(predictor: Predictor, tmp_path: Path) -> None:
    path = report_of(predictor, tmp_path)
    report = json.loads(path.read_text())
    for point in report["points"]:
        point["concurrency"] *= 8
    path.write_text(json.dumps(report))
    found = calibrate(path, predictor, "Qwen/Qwen3-8B", copies=8)
    assert found.constants.speculative_step == pytest.approx(TRUTH["speculative_step"], rel=0.02)
