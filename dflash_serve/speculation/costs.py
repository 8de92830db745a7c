"""Costs of steps: measured before serving starts (`CostModel`), and as served steps corrected them (`LearntCosts`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from math import log
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeFloat, PositiveInt

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Job = TypeVar("Job")
Measurements = Annotated[dict[PositiveInt, Seconds], Field(min_length=1)]

NODES: Final = 17
"""Corrections are kept for 1, 2, 4, ... 65536 rows: more than any step verifies."""
CONFIRMED: Final = 0.05
"""Largest relative gap between the two least of repeated measurements."""
LEAST_SHARE: Final = 0.1
"""Least share of a measured pass that is left after the cost of its contexts is subtracted."""


def is_confirmed(seconds: Sequence[float]) -> bool:
    """True if the two least measurements agree; else other work may have disturbed all of them."""
    least, *more = sorted(seconds)
    return bool(more) and more[0] <= (1 + CONFIRMED) * least


def time_in_turns(
    jobs: Collection[Job],
    timed: Callable[[Job], float],
    repetitions: int,
    most: int,
    agreed: Callable[[list[Job]], Iterable[Job]] = list,
) -> dict[Job, list[float]]:
    """Seconds of each job, repeated in turns, so that other work disturbs all jobs alike. The first turn warms up.

    Noise only adds time, so the least of a job's seconds is its figure.

    Args:
        timed: runs a job and gives its seconds.
        repetitions: of every job; those that are not confirmed then are repeated on, up to `most` times.
        agreed: gets the jobs of a turn, and gives those that all ranks run.
    """
    times: dict[Job, list[float]] = {job: [] for job in jobs}
    for turn in range(1 + most):
        for job in agreed([job for job in jobs if turn <= repetitions or not is_confirmed(times[job])]):
            seconds = timed(job)
            if turn:
                times[job].append(seconds)
    return times


def of_context_token(short: float, long: float, tokens: int) -> float:
    """Seconds that one token of context adds, by two passes whose contexts differ by so many tokens."""
    return max(0.0, long - short) / max(1, tokens)


def without_context(taken: float, of_context: float) -> float:
    """Seconds of a pass without those of its contexts, which are estimates."""
    return max(LEAST_SHARE * taken, taken - of_context)


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
    def _target(self) -> Floats:
        return _curve(self.target)

    @cached_property
    def _draft(self) -> Floats:
        return _curve(self.draft)

    def step_seconds(self, widths: list[int], context_tokens: int = 0) -> float:
        """A whole step; those requests are drafted that verify a drafted token."""
        drafted = len(widths) - widths.count(1)
        return self.of_step(sum(widths), drafted, Context(context_tokens, len(widths)))

    def of_step(self, rows: int, drafted: int, context: Context = NO_CONTEXT) -> float:
        """Seconds of a step that verifies `rows` and drafts for `drafted` requests, 0 = no draft."""
        return float(self._seconds(rows, drafted, context))

    def of_steps(self, rows: Integers, drafted: Integers, context: Context = NO_CONTEXT) -> Floats:
        """Seconds of many such steps; all [M]."""
        return np.asarray(self._seconds(rows, drafted, context))

    def _seconds(self, rows: Any, drafted: Any, context: Context) -> Any:
        attended = rows * (context.tokens / context.requests)
        target = _at(self._target, rows) + self.target_context * context.tokens + self.target_attention * attended
        return target + (_at(self._draft, drafted) + self.draft_context * context.tokens) * (drafted > 0)


def _curve(measured: Mapping[int, float]) -> Floats:
    """Seconds of every size from 0 to the largest measured: every step looks them up."""
    sizes = sorted(measured)
    seconds = np.array([measured[size] for size in sizes])
    return np.interp(np.arange(sizes[-1] + 1), sizes, np.minimum.accumulate(seconds[::-1])[::-1])


def _at(curve: Floats, size: Any) -> Any:
    last = len(curve) - 1
    if isinstance(size, int):  # a fifth of the time that numpy takes for one number
        return curve[min(size, last)] * max(1.0, size / last)
    return curve[np.minimum(size, last)] * np.maximum(1.0, size / last)


Corrections = Annotated[list[FiniteFloat], Field(min_length=2 * NODES, max_length=2 * NODES)]


class LearntCosts(BaseModel):
    """Corrections of a `CostModel` from served steps, for the next server to begin with. To and from JSON.

    mean: [2 * NODES], logarithms of ratios: steps without a draft, then with one, of 1, 2, 4, ... rows.
    covariance: [2 * NODES, 2 * NODES], how well that is known of each; None = the costs are a guess, and nothing is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean: Corrections
    covariance: Annotated[list[Corrections], Field(min_length=2 * NODES, max_length=2 * NODES)] | None = None

    @classmethod
    def of_unit(cls, seconds: float) -> LearntCosts:
        """Corrections of a model with costs in another unit, of `seconds` each; nothing else is known."""
        return cls(mean=[log(seconds)] * 2 * NODES)
