"""What steps cost: measured before serving starts (`CostModel`), and kept true by every served step (`StepCosts`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, log
from typing import Annotated, Final, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeFloat, PositiveInt

from dflash_serve.speculation.belief import Belief, Integers, Vector

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Measurements = Annotated[dict[PositiveInt, Seconds], Field(min_length=1)]

NODES: Final = 17
"""Corrections are kept for 1, 2, 4, ... 65536 rows, and between them interpolated over the logarithm."""
OFF, ON = 0, 1
COMMON_SPREAD: Final = 0.6
"""How far all steps together may be from what was measured (standard deviation, of the logarithm)."""
KIND_SPREAD: Final = 0.15
"""How far steps with and without a draft may be from one another, beyond that."""
ROWS_SPREAD: Final = 0.15
"""How far steps of other sizes may be, beyond that."""
GUESSED: Final = 3
"""How many times further steps may be from a guess of their costs than from measurements."""
COMMON_MEMORY: Final = 200
"""Steps that a served step is remembered for, of what all share: the machine's speed."""
COST_MEMORY: Final = 500
"""The same of what they do not: the cost of one width beside another changes little."""
CHANGES: Final = 0.02
"""How likely it is of each step that the machine's speed has just changed, all at once (GUESSED**2 times less so beside
costs that are a guess: what surprises is the guess)..."""
FARTHEST: Final = 0.5
"""...by so much (spread, of the logarithm); no step adds more to the noise, either."""
NOISE: Final = 0.05
"""The spread of one step's time, before any was seen (of the logarithm); then it is estimated, never below LEAST."""
LEAST_NOISE: Final = 0.01
BETWEEN_RUNS: Final = 20
"""Steps that a server's start counts for: what the last one learnt is known a little less."""
CONFIRMED: Final = 0.05
"""How much longer than the least the second least of repeated measurements may be, as a share of it."""


def is_confirmed(seconds: Sequence[float]) -> bool:
    """Whether the least of repeated measurements was met twice; else all may have been taken beside other work."""
    least, *more = sorted(seconds)
    return bool(more) and more[0] <= (1 + CONFIRMED) * least


class Context(NamedTuple):
    """The K/V that a step's requests have: tokens of all of them together, and how many they are."""

    tokens: int = 0
    requests: int = 1


NO_CONTEXT: Final = Context()


class CostModel(BaseModel):
    """Measured seconds. To and from JSON with `model_dump_json` and `model_validate_json`.

    target: rows of one target forward (the widths of all requests summed) -> seconds.
    draft: requests drafted in one pass -> seconds, all the drafter's work of a step included.
    target_context, draft_context: seconds more for every token of K/V that the requests of a step have together.
    target_attention: seconds more for every such token and row that attends to it, where reading does not hide that.

    Between measurements it interpolates; below the first it stays level; beyond the last it grows in proportion, which
    overstates the cost, so measure up to max_batch_size x block_size rows. Monotone by reading a measurement that a
    larger one undercuts as the larger one: noise only ever adds time, and a batch could be padded to the larger shape.

    Raises:
        pydantic.ValidationError: a table is empty, or a row count or a time is not positive.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: Measurements
    draft: Measurements
    target_context: NonNegativeFloat = 0.0
    draft_context: NonNegativeFloat = 0.0
    target_attention: NonNegativeFloat = 0.0

    @cached_property
    def _target(self) -> _Curve:
        return _Curve.through(self.target)

    @cached_property
    def _draft(self) -> _Curve:
        return _Curve.through(self.draft)

    def target_seconds(self, rows: int) -> float:
        return float(self._target.at(rows))

    def draft_seconds(self, requests: int) -> float:
        return float(self._draft.at(requests))

    def step_seconds(self, widths: list[int], context_tokens: int = 0) -> float:
        """A whole step; those requests are drafted that verify a drafted token."""
        rows, drafted = np.array([sum(widths)]), np.array([sum(width > 1 for width in widths)])
        return float(self.of_steps(rows, drafted, Context(context_tokens, len(widths)))[0])

    def of_steps(self, rows: Integers, drafted: Integers, context: Context = NO_CONTEXT) -> Vector:
        """Seconds of steps that verify `rows` and draft for `drafted` requests, 0 = no draft; all [M]."""
        attended = rows * (context.tokens / context.requests)
        target = self._target.at(rows) + self.target_context * context.tokens + self.target_attention * attended
        draft = self._draft.at(drafted) + self.draft_context * context.tokens
        return np.asarray(target + np.where(drafted > 0, draft, 0.0))


@dataclass(frozen=True)
class _Curve:
    """A monotone piecewise linear curve through measurements."""

    seconds: Vector
    """Of every size from 0 to the largest measured: looked up in every step."""

    @classmethod
    def through(cls, measured: Mapping[int, float]) -> _Curve:
        sizes = sorted(measured)
        seconds = np.array([measured[size] for size in sizes])
        monotone = np.minimum.accumulate(seconds[::-1])[::-1]
        return cls(np.interp(np.arange(sizes[-1] + 1), sizes, monotone))

    def at(self, size: Integers | int) -> Vector:
        last = len(self.seconds) - 1
        return np.asarray(self.seconds[np.minimum(size, last)] * np.maximum(1.0, np.asarray(size) / last))


Corrections = Annotated[list[FiniteFloat], Field(min_length=2 * NODES, max_length=2 * NODES)]


class LearntCosts(BaseModel):
    """What served steps taught of a `CostModel`, for the next server to begin with. To and from JSON.

    mean: [2 * NODES], logarithms of ratios: steps without a draft, then with one, of 1, 2, 4, ... rows.
    covariance: [2 * NODES, 2 * NODES], how well that is known of each; None = the costs are a guess, and nothing is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean: Corrections
    covariance: Annotated[list[Corrections], Field(min_length=2 * NODES, max_length=2 * NODES)] | None = None

    @classmethod
    def of_unit(cls, seconds: float) -> LearntCosts:
        """Nothing but how long the unit of the costs is."""
        return cls(mean=[log(seconds)] * 2 * NODES)


class StepCosts:
    """A `CostModel` corrected by what served steps took.

    The logarithm of the ratio, step by step, is a `Belief`: over steps without and with a draft of 1, 2, 4, ... rows (a
    part for each of the two kinds, one that neighbouring sizes share), and over what all of them share, the machine's
    speed. So a width that has not been served for long still follows the machine, and is known less. A neighbour that
    comes while steps of one width are taken, and goes while they are of another, would teach that the one is dear and
    the other cheap: the more a step is off by, the likelier it is that the machine's speed has changed, and is known as
    much less, so that one step of the other kind tells which of the two it was. A step
    that took far longer than thought (another process, a collection of garbage) moves the mean as if it had taken three
    spreads longer, and is no better a measurement than that.

    Args:
        measured: what is corrected.
        learnt: what an earlier run of the same server learnt of it.
    """

    def __init__(self, measured: CostModel, learnt: LearntCosts | None = None) -> None:
        self.measured = measured
        kind, size = np.repeat([OFF, ON], NODES), np.tile(np.arange(NODES), 2)
        alike = kind[:, None] == kind[None, :]
        near = np.exp(-np.abs(size[:, None] - size[None, :]) / 1.5)
        mean = np.array(learnt.mean) if learnt else np.zeros(2 * NODES)
        wider = GUESSED if learnt and not learnt.covariance else 1  # and wanders as fast
        prior = np.zeros((2 * NODES + 1, 2 * NODES + 1))
        prior[:-1, :-1], prior[-1, -1] = alike * (KIND_SPREAD**2 + ROWS_SPREAD**2 * near), COMMON_SPREAD**2
        memory = np.array([COST_MEMORY] * 2 * NODES + [COMMON_MEMORY])
        self._correction = Belief(np.append(mean, 0.0), wider**2 * prior, wider**2 * memory)
        if learnt and learnt.covariance:
            self._correction.covariance[:-1, :-1] = learnt.covariance
            self._correction.drift(BETWEEN_RUNS)
        self._changes = CHANGES / wider**2
        self.noise = NOISE
        """Spread of one step's time, of the logarithm."""

    @property
    def _spread(self) -> float:
        """What a step's time is taken to scatter by."""
        return max(self.noise, LEAST_NOISE)

    @property
    def learnt(self) -> LearntCosts:
        """What is known now."""
        mean = (self._correction.mean[:-1] + self._correction.mean[-1]).round(6)
        covariance = self._correction.covariance[:-1, :-1].round(8)
        return LearntCosts(mean=mean.tolist(), covariance=covariance.tolist())

    def of_steps(self, rows: Integers, drafted: Integers, context: Context = NO_CONTEXT) -> Vector:
        """As `CostModel.of_steps`, as things are now."""
        correction = np.where(drafted > 0, self._at(ON, rows), self._at(OFF, rows))
        return self.measured.of_steps(rows, drafted, context) * np.exp(correction)

    def observe(self, rows: int, drafted: int, context: Context, *seconds: float) -> None:
        """A step took so long, or some alike, one after the other."""
        self._correction.drift(len(seconds))
        weights = _weights(ON if drafted else OFF, rows)
        thought = float(self.measured.of_steps(np.array([rows]), np.array([drafted]), context)[0])
        mean, unknown = float(weights @ self._correction.mean), float(weights @ self._correction.covariance @ weights)
        surprise, precision = 0.0, 0.0
        for taken in seconds:
            off_by = log(taken / thought) - mean
            far = min(abs(off_by), FARTHEST)
            self.noise += 0.02 * (1.25 * far - self.noise)  # 1.25 x mean deviation = spread (Gaussian)
            variance = self._spread**2
            changed = FARTHEST**2 * self._has_changed(off_by, unknown + variance)
            self._correction.covariance[-1, -1] += changed
            unknown += changed
            if off_by**2 > 9 * variance:
                variance = (unknown + variance) * abs(off_by) / (3 * self._spread) - unknown
            surprise, precision = surprise + off_by / variance, precision + 1 / variance
        self._correction.learn_sum(weights, surprise / precision, precision**-0.5)

    def _has_changed(self, off_by: float, variance: float) -> float:
        """How likely it is that the machine's speed has changed, when a step is `off_by` where `variance` is usual."""
        wider = variance + FARTHEST**2
        log_odds = log(self._changes) + 0.5 * (log(variance / wider) + off_by**2 * (1 / variance - 1 / wider))
        return 1 / (1 + exp(-min(log_odds, 50.0)))

    def doubt(self, off_rows: int, on_rows: Integers) -> tuple[Vector, Vector]:
        """Spread of the ratio of steps with a draft [M] and one without, and what of it one step without would settle.

        Both of the logarithm, [M] each.
        """
        covariance, off = self._correction.covariance, _weights(OFF, off_rows)
        own = off - _COMMON  # without what steps with a draft have, too
        with_own, with_off = covariance @ own, covariance @ off
        place = np.minimum(_place(on_rows), NODES - 1)
        left = np.minimum(place.astype(np.int64), NODES - 2)
        high, below, above = place - left, NODES + left, NODES + left + 1
        low = 1 - high
        variance = low**2 * covariance[below, below] + high**2 * covariance[above, above]
        variance += 2 * low * high * covariance[below, above]
        variance += own @ with_own - 2 * (low * with_own[below] + high * with_own[above])
        told = low * with_off[below] + high * with_off[above] - own @ with_off
        settled = np.abs(told) / np.sqrt(off @ with_off + self._spread**2)
        return np.sqrt(np.maximum(variance, 0)), settled

    def _at(self, kind: int, rows: Integers) -> Vector:
        nodes = self._correction.mean[kind * NODES : (kind + 1) * NODES]
        return np.asarray(np.interp(_place(rows), np.arange(NODES), nodes) + self._correction.mean[-1])


class BelievedCosts:
    """A `CostModel` that is taken at its word, whatever served steps take."""

    def __init__(self, measured: CostModel) -> None:
        self.measured = measured

    def of_steps(self, rows: Integers, drafted: Integers, context: Context = NO_CONTEXT) -> Vector:
        return self.measured.of_steps(rows, drafted, context)

    def observe(self, rows: int, drafted: int, context: Context, *seconds: float) -> None:
        pass

    def doubt(self, off_rows: int, on_rows: Integers) -> tuple[Vector, Vector]:
        return np.zeros(len(on_rows)), np.zeros(len(on_rows))


def _place(rows: Integers) -> Vector:
    """Where sizes lie among the nodes."""
    return np.log2(np.maximum(rows, 1))


_COMMON: Final = np.append(np.zeros(2 * NODES), 1.0)
"""[2 * NODES + 1]: what all steps share."""


def _weights(kind: int, rows: int) -> Vector:
    """[2 * NODES + 1]: which corrections a step of so many rows has, that of all last."""
    weights = _COMMON.copy()
    place = min(float(np.log2(max(rows, 1))), NODES - 1.0)
    left = min(int(place), NODES - 2)
    weights[kind * NODES + left], weights[kind * NODES + left + 1] = left + 1 - place, place - left
    return weights
