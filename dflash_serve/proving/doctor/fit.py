"""How well a prediction explains what was observed, on as much as the engine tells.

Three kinds of evidence, best first:

* **paired**: counts of each prompt. Speculation changes no token, so the right explanation predicts each prompt's
  counts almost exactly, and a wrong one misses prompt by prompt even where its τ is right. The distance d of a
  prompt's counts (steps, and steps that reached each slot) is Cauchy with a scale of one step: a few prompts where the
  answers parted at a near-tie cost every explanation alike.
* **slots**: counts by slot of other prompts, or of all together. Given that slot k - 1 was accepted, slot k is or is
  not: a beta-binomial whose prior is what was predicted (with Jeffreys' 1/2), so both samples' errors count.
* **length**: τ alone, normal with the errors of both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from dflash_serve.proving.doctor.counts import Counts, length_error, total

ROUNDING = 0.005 / math.sqrt(3)
"""Standard error of a figure given with two decimals."""
FEW = 5
"""Trials below which a slot says nothing."""


@dataclass(frozen=True)
class Observation:
    """What is known of the suspect."""

    length: float
    """τ."""
    each: tuple[Counts, ...] | None = None
    """Of each prompt, the same as were predicted."""
    whole: Counts | None = None
    """Of all together."""
    answers: tuple[str, ...] | None = None

    @property
    def kind(self) -> str:
        """`paired`, `slots` or `length`."""
        if self.each is not None:
            return "paired"
        return "slots" if self.whole is not None and self.whole.reached is not None else "length"


def log_likelihood(observed: Observation, predicted: Sequence[Counts]) -> float:
    """Up to a constant that is the same for all predictions."""
    if not total(predicted).steps:
        return -math.inf  # nothing is ever drafted under it, which is not what was observed
    if observed.each is not None:
        return -sum(math.log1p(_distance(*pair)) for pair in zip(observed.each, predicted, strict=True))
    if observed.whole is not None and observed.whole.reached is not None:
        return sum(_beta_binomial(*trial) for trial in _trials(observed.whole, total(predicted)))
    error = _error(observed, predicted)
    return -0.5 * ((observed.length - total(predicted).length) / error) ** 2 - math.log(error)


def p_value(observed: Observation, predicted: Sequence[Counts]) -> float:
    """Probability of a difference as large as this, in τ and in survival where it is known, if the prediction holds."""
    if not total(predicted).steps:
        return 0.0
    z = (observed.length - total(predicted).length) / _error(observed, predicted)
    p = 2 * NormalDist().cdf(-abs(z))
    if observed.whole is None or observed.whole.reached is None:
        return p
    squares = [square for trial in _trials(observed.whole, total(predicted)) if (square := _square(*trial)) is not None]
    return min(1.0, 2 * min(p, _chi_square_tail(sum(squares), len(squares))))


def _distance(a: Counts, b: Counts) -> float:
    """Squared, in steps."""
    if a.reached is None or b.reached is None:
        return float((a.steps - b.steps) ** 2 + (a.accepted - b.accepted) ** 2)
    return float((a.steps - b.steps) ** 2 + sum((x - y) ** 2 for x, y in zip(a.reached, b.reached, strict=True)))


def _error(observed: Observation, predicted: Sequence[Counts]) -> float:
    """Standard error of the difference in τ; an unknown sample counts as one like ours."""
    ours = length_error(predicted) or 0.1
    theirs = length_error(observed.each) if observed.each else None
    return math.sqrt(ours**2 + (ours if theirs is None else theirs) ** 2 + ROUNDING**2)


def _trials(observed: Counts, predicted: Counts) -> Iterator[tuple[int, int, int, int]]:
    """By slot: (observed trials and successes, predicted trials and successes), given the slot before."""
    assert observed.reached is not None
    assert predicted.reached is not None
    tries, guesses = observed.steps, predicted.steps
    for successes, guessed in zip(observed.reached, predicted.reached, strict=True):
        yield tries, successes, guesses, guessed
        tries, guesses = successes, guessed


def _beta_binomial(tries: int, successes: int, guesses: int, guessed: int) -> float:
    a, b = guessed + 0.5, guesses - guessed + 0.5
    return _log_beta(successes + a, tries - successes + b) - _log_beta(a, b)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _square(tries: int, successes: int, guesses: int, guessed: int) -> float | None:
    """Squared normal deviate of two proportions; None where there is too little to compare."""
    if min(tries, guesses) < FEW:
        return None
    share = (successes + guessed) / (tries + guesses)
    variance = share * (1 - share) * (1 / tries + 1 / guesses)
    return (successes / tries - guessed / guesses) ** 2 / variance if variance else None


def _chi_square_tail(square: float, freedom: int) -> float:
    """P(chi-square >= square) by Wilson and Hilferty's cube root."""
    if freedom == 0:
        return 1.0
    spread = 2 / (9 * freedom)
    return NormalDist().cdf(-((square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))
