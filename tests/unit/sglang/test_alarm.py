"""An alarm on acceptance: collapse switches speculation off until a probe finds it back; perfection is reported."""

from __future__ import annotations

import random

import pytest

from dflash_sglang.plugin.widths import PERFECT, PROBE_EVERY, Alarm


def serve(alarm: Alarm, survival: float, steps: int, width: int = 4) -> int:
    """Steps of one request of which slot 1 survives so often; gives how many of them drafted."""
    luck, drafted = random.Random(1), 0
    for _ in range(steps):
        if alarm.allows():
            drafted += 1
            alarm.verified(width, [int(luck.random() < survival)])
    return drafted


def test_acceptance_that_stays_what_it_was_is_left_alone() -> None:
    alarm = Alarm()
    assert serve(alarm, 0.7, 5000) == 5000
    assert serve(alarm, 0.4, 5000) == 5000  # harder prompts


def test_a_collapse_switches_speculation_off_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    alarm = Alarm()
    serve(alarm, 0.7, 5000)
    drafted = serve(alarm, 0.0, 5000)
    assert alarm.raised
    assert drafted < 1500
    assert "acceptance has collapsed" in caplog.text


def test_it_comes_back_when_a_probe_finds_acceptance_where_it_was(caplog: pytest.LogCaptureFixture) -> None:
    alarm = Alarm()
    serve(alarm, 0.7, 5000)
    serve(alarm, 0.0, 3000)
    assert serve(alarm, 0.7, PROBE_EVERY * 2) > 0
    assert not alarm.raised
    assert "acceptance is back" in caplog.text


def test_a_drafter_that_never_was_any_good_cannot_collapse() -> None:
    alarm = Alarm()
    assert serve(alarm, 0.01, 5000) == 5000


def test_acceptance_of_exactly_one_is_reported_as_a_fault_once(caplog: pytest.LogCaptureFixture) -> None:
    alarm = Alarm()
    for _ in range(PERFECT):
        alarm.verified(4, [3])
    assert alarm.too_good
    assert caplog.text.count("which no drafter achieves") == 1
    alarm.verified(4, [2])
    assert not alarm.too_good
