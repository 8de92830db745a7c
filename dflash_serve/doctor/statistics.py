"""How well a prediction explains what was observed, on as much as the engine tells.

Three kinds of evidence, best first:

* **paired**: counts of each prompt. Speculation changes no token, so the right explanation predicts each prompt's
  counts almost exactly, and a wrong one misses prompt by prompt even where its τ is right. The distance d of a
  prompt's counts (verifications, and those that accepted each slot) is Cauchy with a scale of one step: a few prompts
  where the answers parted at a near-tie cost every explanation alike. Where the width changed from step to step, the
  scale grows by how much the sound counts depend on the order of the widths, which no server tells.
* **slots**: counts by slot of other prompts, or of all together. Given that slot k - 1 was accepted, slot k is or is
  not: a beta-binomial whose prior is what was predicted (with Jeffreys' 1/2), so both samples' errors count.
* **length**: τ alone, normal with the errors of both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from scipy import special, stats

from dflash_serve.doctor.evidence import Observation
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

ROUNDING = 0.005 / math.sqrt(3)
"""Standard error of a figure given with two decimals."""
FEW = 5
"""Trials below which a slot says nothing."""

Trial = tuple[float, float, float, float]
"""Of one slot, given that the slot before was accepted: trials and successes as observed, then as predicted."""


def log_likelihood(observed: Observation, predicted: Sequence[AcceptanceStatistics]) -> float:
    """Log likelihood of what was observed, up to a constant that is the same for all predictions.

    Args:
        predicted: by prompt.
    """
    whole = total(predicted)
    if whole.acceptance_length is None:
        return -math.inf  # nothing is ever drafted under it, which is not what was observed
    if observed.each is not None:
        errors = observed.errors or [0.0] * len(observed.each)
        return -sum(
            math.log1p(distance(*pair) / (1 + error**2))
            for *pair, error in zip(observed.each, predicted, errors, strict=True)
        )
    if observed.has_slots:
        return sum(_beta_binomial(trial) for trial in _trials(observed.whole, whole))
    error = _difference_error(observed, predicted)
    return -0.5 * ((observed.acceptance_length - whole.acceptance_length) / error) ** 2 - math.log(error)


def p_value(observed: Observation, predicted: Sequence[AcceptanceStatistics]) -> float:
    """Probability of a difference as large as this, in τ and in survival where it is known, if the prediction holds."""
    whole = total(predicted)
    if whole.acceptance_length is None:
        return 0.0
    z = (observed.acceptance_length - whole.acceptance_length) / _difference_error(observed, predicted)
    of_length = float(2 * stats.norm.sf(abs(z)))
    if not observed.has_slots:
        return of_length
    squares = [square for trial in _trials(observed.whole, whole) if (square := _square(*trial)) is not None]
    of_survival = float(stats.chi2.sf(sum(squares), len(squares))) if squares else 1.0
    return min(1.0, 2 * min(of_length, of_survival))


def length_error(each: Sequence[AcceptanceStatistics]) -> float | None:
    """Standard error of τ over prompts, by the jackknife: prompts differ far more than steps of one prompt.

    Args:
        each: by prompt; verifications and accepted tokens are known.

    Returns:
        None where one prompt has all the verifications.
    """
    whole, count = total(each), len(each)
    if count < 2 or any(one.verifications == whole.verifications for one in each):
        return None
    verifications, accepted = known_counts(whole)
    without = [1 + (accepted - b) / (verifications - a) for a, b in map(known_counts, each)]
    mean = sum(without) / count
    return math.sqrt((count - 1) / count * sum((length - mean) ** 2 for length in without))


def known_counts(counts: AcceptanceStatistics) -> tuple[float, float]:
    """Verifications and accepted drafted tokens of counts that have them."""
    assert counts.verifications is not None
    assert counts.accepted is not None
    return counts.verifications, counts.accepted


def distance(a: AcceptanceStatistics, b: AcceptanceStatistics) -> float:
    """Between the counts of one prompt: squared, in steps."""
    (steps, accepted), (other_steps, other_accepted) = known_counts(a), known_counts(b)
    if a.accepted_by_slot is None or b.accepted_by_slot is None:
        return (steps - other_steps) ** 2 + (accepted - other_accepted) ** 2
    slots = zip_longest(a.accepted_by_slot, b.accepted_by_slot, fillvalue=0)
    return (steps - other_steps) ** 2 + sum((x - y) ** 2 for x, y in slots)


def _difference_error(observed: Observation, predicted: Sequence[AcceptanceStatistics]) -> float:
    """Standard error of the difference in τ; an unknown sample counts as one like ours."""
    ours = length_error(predicted) or 0.1
    theirs = length_error(observed.each) if observed.each else None
    return math.sqrt(ours**2 + (ours if theirs is None else theirs) ** 2 + ROUNDING**2)


def _trials(observed: AcceptanceStatistics, predicted: AcceptanceStatistics) -> Iterator[Trial]:
    """One for each slot, from slot 1 on."""
    assert observed.accepted_by_slot is not None
    assert predicted.accepted_by_slot is not None
    tries, guesses = known_counts(observed)[0], known_counts(predicted)[0]
    for successes, guessed in zip_longest(observed.accepted_by_slot, predicted.accepted_by_slot, fillvalue=0):
        yield tries, successes, guesses, guessed
        tries, guesses = successes, guessed


def _beta_binomial(trial: Trial) -> float:
    """log P(observed successes), without the binomial coefficient, which is the same for all predictions."""
    tries, successes, guesses, guessed = trial
    a, b = guessed + 0.5, guesses - guessed + 0.5
    return float(special.betaln(successes + a, tries - successes + b) - special.betaln(a, b))


def _square(tries: float, successes: float, guesses: float, guessed: float) -> float | None:
    """Squared normal deviate of two proportions; None where there is too little to compare."""
    if min(tries, guesses) < FEW:
        return None
    share = (successes + guessed) / (tries + guesses)
    variance = share * (1 - share) * (1 / tries + 1 / guesses)
    return (successes / tries - guessed / guesses) ** 2 / variance if variance else None
