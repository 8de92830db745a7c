"""The test of answers to many questions is exact, and looks at both choices, places and situations."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from dflash_serve.speculation.params import SamplingParams
from dflash_serve.verify.questions import CELLS, PAIRS, STREAM, Question
from dflash_serve.verify.ranks import compare_mixed, exchange_p_value, features
from dflash_serve.verify.rules import Answer, Asked

RATE = 1e-4
TOKENS = 12


def test_p_is_the_share_of_all_exchanges_whose_largest_z_is_as_large() -> None:
    table = np.random.default_rng(1).normal(0.4, 1, (8, 3)).astype(np.float32)
    norms = np.sqrt((table**2).sum(0))
    every = [np.abs(np.array(signs) @ table / norms).max() for signs in product((-1, 1), repeat=8)]
    exact = np.mean(np.array(every) >= every[-1] - 1e-9)
    estimates = [exchange_p_value(table, 1e-3, seed)[0] for seed in range(40)]
    assert np.mean(estimates) == pytest.approx(exact, rel=0.15)


def test_what_never_differs_has_p_1() -> None:
    assert exchange_p_value(np.zeros((8, 3), np.float32), RATE)[0] == 1.0


def test_ranks_are_split_by_place_and_choice() -> None:
    whole = Answer([*range(10), *range(10)], choices=2, ranks=[0] * 8 + [2] * 2 + [1] * 10)
    expected = {"scored": 1.0, "early": 0.0, "late": 2.0, "second": 1.0, "repeated": 0.3}
    assert dict(features(whole, [0, 1, 2])) == expected
    assert dict(features(Answer([5, 5], ranks=[1]), [])) == {"scored": 0.0, "repeated": 0.5}


def asked(shift: float, where: str) -> list[Asked]:
    """Ranks by chance; those with speculation are larger in one group."""
    random, found = np.random.default_rng(2), []
    for case, (situation, setting) in CELLS.items():
        for number in range(PAIRS):
            question = Question([1], SamplingParams(), STREAM if number % 2 else {})
            groups = {case, situation, setting, f"{setting}, streamed" if number % 2 else setting}
            sides = [random.binomial(5, 0.2 + added, TOKENS).tolist() for added in (0, shift if where in groups else 0)]
            plain, other = (Answer(list(range(TOKENS)), ranks=ranks) for ranks in sides)
            found.append(Asked(case, number + 1, question, False, plain, other))
    return found


@pytest.mark.parametrize(
    "group", ["second turn", "temperature 1", "temperature 1, streamed", "stop string, all filters"]
)
def test_a_shift_in_one_group_is_seen_and_the_group_is_named(group: str) -> None:
    assert not compare_mixed(asked(0, group), RATE).differs
    found = compare_mixed(asked(0.2, group), RATE)
    assert (found.differs, found.where) == (True, group)
