"""The permutation test is exact, the power it states is its power, and repetition is measured where it matters."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from dflash_serve.verify.distributions import features, p_value, repeats, smallest_deviation, statistic

Answers = list[list[str | int]]
RATE = 1e-3


def answers(count: int, shift: float, seed: int) -> Answers:
    """Three tokens; `shift` of the mass of the second one goes to its most probable value."""
    random = np.random.default_rng(seed)
    p = np.array([0.4, 0.3, 0.2, 0.1])
    second = (1 - shift / 0.6) * p + shift / 0.6 * np.array([1, 0, 0, 0])
    return [[int(random.choice(3)), int(random.choice(4, p=second)), int(random.choice(5))] for _ in range(count)]


def test_p_is_the_share_of_all_dealings_that_are_as_large() -> None:
    first: Answers = [[token] for token in "aaaaaab"]
    second: Answers = [[token] for token in "aabbbbb"]
    table = features([*first, *second], [*first, *second])
    totals = table.sum(0)

    def value(chosen: tuple[int, ...]) -> float:
        side = -np.ones(14, np.float32)
        side[list(chosen)] = 1
        return float(statistic(side @ table, totals))

    observed = value(tuple(range(7)))
    exact = np.mean([value(chosen) >= observed - 1e-6 for chosen in combinations(range(14), 7)])
    estimates = [p_value(first, second, 1e-3, seed) for seed in range(20)]
    assert np.mean(estimates) == pytest.approx(exact, rel=0.15)


def test_p_never_comes_below_what_the_number_of_dealings_allows() -> None:
    p = p_value([["a"]] * 50, [["b"]] * 50, RATE)
    assert 1 / (2 / RATE + 2) <= p <= RATE


def test_what_never_varies_does_not_differ_and_an_answer_that_ends_early_does() -> None:
    assert p_value([[1, 2, 3]] * 30, [[1, 2, 3]] * 30, RATE) == 1.0
    assert p_value([], [], RATE) == 1.0
    assert p_value([[1, 2, 3]] * 30, [[1, 2]] * 30, RATE) <= RATE


def test_the_stated_deviation_is_seen_about_nine_times_in_ten_and_a_third_of_it_seldom() -> None:
    samples = 150
    pool = answers(2 * samples, 0.0, 1)
    least = smallest_deviation(pool, samples, RATE, 0.9)
    assert least is not None
    assert 0.1 < least < 0.4

    def seen(shift: float) -> float:
        runs = range(40)
        pairs = [(answers(samples, 0.0, 100 + n), answers(samples, shift, 200 + n)) for n in runs]
        return float(np.mean([p_value(*pair, RATE, n) <= RATE for n, pair in enumerate(pairs)]))

    assert seen(least) >= 0.7
    assert seen(least / 3) <= 0.3


def test_a_deviation_that_no_sample_of_this_size_shows_is_none() -> None:
    unlike: Answers = [[0, n] for n in range(40)]
    assert smallest_deviation(unlike, 4, 1e-6, 0.9) is None
    assert smallest_deviation([[1]] * 20, 20, RATE, 0.9) is None


def test_repetition_is_that_of_tokens_which_were_drafted_and_used() -> None:
    greedy: Answers = [[n % 4, n % 4 + 1, n % 4 + 2, n] for n in range(40)]  # first and last token vary
    assert repeats(greedy) == 1.0
    free = [[0, n % 2, n // 2 % 2, n // 4 % 2] for n in range(40)]
    found = repeats([list(answer) for answer in free])
    assert found is not None
    assert found < 0.6
    assert repeats([[1, 2]] * 5) is None
