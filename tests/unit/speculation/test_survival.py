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
        estimate.observe([name + str(number // 50)], [width], [int(np.cumprod(hits).sum())])


def test_survival_is_learnt_whatever_the_width() -> None:
    conditional = [0.9, 0.8, 0.7, 0.6]
    estimate = AcceptanceEstimate(4)
    for round_ in range(40):
        simulate(estimate, conditional, 5, 25, seed=round_, name=f"wide {round_}")
        simulate(estimate, conditional, 2, 25, seed=100 + round_, name=f"narrow {round_}")
    assert estimate.overall() == pytest.approx(np.cumprod(conditional), abs=0.15)


@pytest.mark.parametrize("asked_every", [2, 8])
def test_steps_that_are_learnt_from_together_teach_what_they_teach_one_by_one(asked_every: int) -> None:
    chance, ids = np.random.default_rng(3), [f"request {i}" for i in range(4)]
    often, seldom = AcceptanceEstimate(7), AcceptanceEstimate(7)
    for step in range(1, 65):
        widths = [1] * 4 if step % 5 == 0 else [8, 4, 2, 8]
        hits = (chance.random((4, 7)) < [[0.8], [0.5], [0.5], [0.2]]).cumprod(1).sum(1)
        for estimate, every in ((often, 1), (seldom, asked_every)):
            estimate.observe(ids, widths, np.minimum(hits, np.array(widths) - 1).tolist())
            if step % every == 0:
                estimate.survival(ids)
    assert seldom.survival(ids) == pytest.approx(often.survival(ids), abs=0.02)
    seldom.observe(ids, [8] * 4, [7] * 4)
    seldom.forget(ids[0])
    assert seldom.offsets.keys() == set(ids[1:])


def test_a_steady_drafter_has_a_steady_estimate() -> None:
    """Luck of some ten steps is no news: the estimate of slot 1 scatters by a few hundredths."""
    estimate, chance, found = AcceptanceEstimate(7), np.random.default_rng(2), []
    for _ in range(600):
        estimate.observe(["a", "b"], [3, 3], (chance.random((2, 2)) < 0.34).cumprod(1).sum(1).tolist())
        found.append(estimate.overall()[0])
    assert np.mean(found[200:]) == pytest.approx(0.34, abs=0.04)
    assert np.std(found[200:]) < 0.05


def test_survival_one_standard_error_off_lies_on_both_sides_of_what_is_known() -> None:
    estimate = AcceptanceEstimate(5)
    simulate(estimate, [0.5] * 5, 6, 30)
    ids = ["a0", "new"]
    known, worse, better = estimate.survival(ids, (0.0, -1.0, 1.0))
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
