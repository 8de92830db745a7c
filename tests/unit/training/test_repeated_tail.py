"""A loop is found, and only a loop."""

from __future__ import annotations

import random

import pytest

from dflash_serve.training.decoding import repeated_tail


@pytest.mark.parametrize("period", [1, 2, 5, 24])
def test_a_loop_is_found_with_its_period(period: int) -> None:
    assert repeated_tail([500, 501, *list(range(period)) * 30]) == period


def test_three_repeats_are_no_loop_yet() -> None:
    assert repeated_tail([*range(100, 160), *list(range(10)) * 3]) == 0


def test_a_short_or_varied_answer_is_no_loop() -> None:
    numbers = random.Random(0)
    assert repeated_tail([1] * 23) == 0
    assert repeated_tail([numbers.randrange(50) for _ in range(300)]) == 0
