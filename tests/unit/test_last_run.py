"""What a server learns of a drafter is where its next run begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_serve.adapter.last_run import EVERY, LEAST, KeptWidth, LastRun
from dflash_serve.checkpoint.source import record_survival
from dflash_serve.deployment.description import Model
from dflash_serve.deployment.variables import SURVIVAL
from dflash_serve.speculation.costs import CostModel, LearntCosts
from dflash_serve.speculation.policy import Step
from dflash_serve.speculation.width import AutoWidth

STEEP = CostModel(target={1: 1.0, 8: 4.0}, draft={1: 1.0})
"""Costs by which only a good drafter is worth a block."""


@pytest.fixture
def drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(SURVIVAL, raising=False)
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def begin(drafter: Path, target: str = "target") -> AutoWidth:
    return KeptWidth(STEEP, 8, LastRun(drafter, Model(model=target)), [1, 2, 8])


def learn(policy: AutoWidth, accepted: int, clock: list[float], seconds: float | None = None) -> None:
    for _ in range(LEAST):
        policy.observe(Step(["a"], [8], [accepted], seconds))
    clock[0] += EVERY
    policy.observe(Step(["a"], [8], [accepted], seconds))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("dflash_serve.adapter.last_run.time.monotonic", lambda: now[0])
    return now


def test_the_last_run_tells_more_than_training_and_the_user_more_than_both(
    drafter: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    record_survival(drafter, [0.9] * 7)
    assert begin(drafter).widths(["a"]) == [8]
    record_survival(drafter, [0.1] * 7)
    assert begin(drafter).widths(["a"]) == [1]
    learn(begin(drafter), 7, clock)
    assert begin(drafter).widths(["a"]) == [8]
    monkeypatch.setenv(SURVIVAL, "0.1,0.1")
    assert begin(drafter).widths(["a"]) == [1]


def test_another_target_and_other_weights_are_not_meant(drafter: Path, clock: list[float]) -> None:
    record_survival(drafter, [0.1] * 7)
    learn(begin(drafter), 7, clock)
    assert begin(drafter, "another target").widths(["a"]) == [1]
    (drafter / "model.safetensors").write_bytes(b"trained")
    assert begin(drafter).widths(["a"]) == [1]


def test_a_short_run_leaves_nothing(drafter: Path, clock: list[float]) -> None:
    policy = begin(drafter)
    clock[0] += EVERY
    policy.observe(Step(["a"], [8], [7]))
    assert LastRun(drafter, Model(model="target")).survival() is None


def test_a_run_whose_blocks_were_trimmed_records_no_survival(drafter: Path, clock: list[float]) -> None:
    run = LastRun(drafter, Model(model="target"))
    learn(KeptWidth(STEEP, 8, run, [1, 2, 8], learnt=LearntCosts.of_unit(0.1), trimmed=True), 3, clock, seconds=1.0)
    assert run.survival() is None
    assert run.costs() is not None


def test_a_cache_that_cannot_be_written_or_read_stops_nobody(drafter: Path, clock: list[float]) -> None:
    path = LastRun(drafter, Model(model="target")).path
    path.parent.mkdir(parents=True)
    path.write_text('{"not": "a survival"}')
    policy = begin(drafter)
    path.unlink()
    path.mkdir()  # nothing can take its place
    learn(policy, 7, clock)
    assert LastRun(drafter, Model(model="target")).survival() is None


def test_what_steps_took_is_kept_of_a_guess_under_its_conditions(drafter: Path, clock: list[float]) -> None:
    run = LastRun(drafter, Model(model="target"), "engine 1")
    policy = KeptWidth(STEEP, 8, run, [1, 2, 8], learnt=LearntCosts.of_unit(0.1))
    learn(policy, 7, clock, seconds=1.0)
    assert LastRun(drafter, Model(model="target"), "engine 1").costs() == policy.times.learnt
    assert LastRun(drafter, Model(model="target"), "engine 2").costs() is None
    run.costs_path.write_text('{"mean": []}')
    assert run.costs() is None


def test_costs_that_were_measured_or_given_are_not_kept(drafter: Path, clock: list[float]) -> None:
    run = LastRun(drafter, Model(model="target"))
    learn(KeptWidth(STEEP, 8, run), 7, clock, seconds=1.0)
    learn(KeptWidth(STEEP, 8, run, believed=True), 7, clock, seconds=1.0)
    assert run.survival() is not None
    assert run.costs() is None
