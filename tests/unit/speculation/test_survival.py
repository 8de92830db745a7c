"""Survival: what steps of any width teach about every slot of every request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from dflash_serve.speculation.width import AcceptanceEstimate


def simulate(
    estimate: AcceptanceEstimate,
    conditional: Sequence[float],
    width: int,
    steps: int,
    *,
    seed: int = 0,
    name: str = "a",
) -> None:
    chance = np.random.default_rng(seed)
    for number in range(steps):
        hits = chance.random(width - 1) < np.array(conditional[: width - 1])
        estimate.observe([name + str(number // 50)], np.array([width]), np.array([int(np.cumprod(hits).sum())]))


def test_survival_is_learnt_whatever_the_width() -> None:
    conditional = [0.9, 0.8, 0.7, 0.6]
    estimate = AcceptanceEstimate(4)
    for round_ in range(40):
        simulate(estimate, conditional, 5, 25, seed=round_, name=f"wide {round_}")
        simulate(estimate, conditional, 2, 25, seed=100 + round_, name=f"narrow {round_}")
    assert estimate.overall() == pytest.approx(np.cumprod(conditional), abs=0.15)


def test_a_steady_drafter_has_a_steady_estimate() -> None:
    """Luck of some ten steps is no news: the estimate of slot 1 scatters by a few hundredths."""
    estimate, chance, found = AcceptanceEstimate(7), np.random.default_rng(2), []
    for _ in range(600):
        accepted = (chance.random((2, 2)) < 0.34).cumprod(1).sum(1)
        estimate.observe(["a", "b"], np.array([3, 3]), accepted)
        found.append(estimate.overall()[0])
    assert np.mean(found[200:]) == pytest.approx(0.34, abs=0.04)
    assert np.std(found[200:]) < 0.05


def test_survival_one_standard_error_off_lies_on_both_sides_of_what_is_known() -> None:
    estimate = AcceptanceEstimate(5)
    simulate(estimate, [0.5] * 5, 6, 30)
    ids = ["a0", "new"]
    known, worse, better = (estimate.survival(ids, errors) for errors in (0.0, -1.0, 1.0))
    assert (worse < known).all()
    assert (better > known).all()


@pytest.mark.parametrize(
    ("known", "expected"),
    [([0.9, 0.81], [0.9, 0.9, 0.9]), ([0.5], [0.5, 0.5, 0.5]), ([1.0, 0.0], [0.98, 0.02, 0.02])],
)
def test_what_is_known_is_the_prior(known: list[float], expected: list[float]) -> None:
    overall = AcceptanceEstimate(3, known).overall()
    conditional = [overall[0], *(np.array(overall[1:]) / np.array(overall[:-1]))]
    assert conditional == pytest.approx(expected, abs=0.15)
