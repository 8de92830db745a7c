"""Which widths give the most tokens per second: those that maximise

    sum_i (1 + sum_{k=1}^{w_i - 1} S_ik) / (T_draft(n) + T_target(sum_i w_i)),    T_draft = 0 if all w_i = 1.

The optimum is exact. (1) Fix the total number R of drafted rows; the denominator is then fixed. A choice of widths
adds R of the numbers S_ik to the numerator, so no more than the sum of the R largest. (2) That sum is attained: S_ik
does not increase with k, so the R largest, ties taken in order of k, hold slot k of a request only together with its
slots before k; that is a choice of widths. (3) Trying every R, 0 included, with these widths therefore meets the best
choice of all. One sort and one look at the cost model per row.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Measurements = Annotated[dict[PositiveInt, Seconds], Field(min_length=1)]


class CostModel(BaseModel):
    """Measured seconds. To and from JSON with `model_dump_json` and `model_validate_json`.

    target: rows of one target forward (the widths of all requests summed) -> seconds.
    draft: requests drafted in one pass -> seconds, all the drafter's work of a step included.

    Between measurements it interpolates; below the first it stays level; beyond the last it grows in proportion, which
    overstates the cost, so measure up to max_batch_size x block_size rows. Monotone by reading a measurement that a
    larger one undercuts as the larger one: noise only ever adds time, and a batch could be padded to the larger shape.

    Raises:
        pydantic.ValidationError: a table is empty, or a row count or a time is not positive.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: Measurements
    draft: Measurements

    @cached_property
    def _target(self) -> "_Curve":
        return _Curve.through(self.target)

    @cached_property
    def _draft(self) -> "_Curve":
        return _Curve.through(self.draft)

    def target_seconds(self, rows: int) -> float:
        return self._target.at(rows)

    def draft_seconds(self, requests: int) -> float:
        return self._draft.at(requests)

    def step_seconds(self, widths: list[int]) -> float:
        """A whole step: the drafter is paid, for the whole batch, as soon as one request verifies a drafted token."""
        drafted = self.draft_seconds(len(widths)) if any(width > 1 for width in widths) else 0.0
        return drafted + self.target_seconds(sum(widths))


@dataclass(frozen=True)
class _Curve:
    """A monotone piecewise linear curve through measurements."""

    sizes: list[int]
    seconds: list[float]

    @classmethod
    def through(cls, measured: Mapping[int, float]) -> "_Curve":
        sizes = sorted(measured, reverse=True)
        lowest = list(accumulate((measured[size] for size in sizes), min))
        return cls(sizes[::-1], lowest[::-1])

    def at(self, size: int) -> float:
        right = bisect_left(self.sizes, size)
        if right == 0:
            return self.seconds[0]
        if right == len(self.sizes):
            return self.seconds[-1] * size / self.sizes[-1]
        (x0, x1), (y0, y1) = self.sizes[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


def choose_widths(
    survivals: Sequence[Sequence[float]],
    cost: CostModel,
    *,
    max_width: int,
    allowed_widths: Sequence[int] | None = None,
) -> list[int]:
    """Chooses each request's width in 1..max_width so that expected tokens per second are highest.

    Args:
        survivals: per request, P(slot k is accepted) for k = 1, 2, ...; one that is shorter than max_width - 1 caps
            that request's width at its length + 1. A rise (rounding) is read as level.
        cost: measured seconds.
        max_width: the block size B, or less.
        allowed_widths: the widths that the engine can run (CUDA graphs); all requests then share one of them, cut to
            a request's own cap only for counting tokens. Width 1 is always allowed.

    Returns:
        One width per request; all 1 means: do not draft. Among equals, the fewest rows.
    """
    capped = [list(accumulate(survival[: max_width - 1], min)) for survival in survivals]
    if allowed_widths is not None:
        return _shared_width(capped, cost, [width for width in allowed_widths if 1 < width <= max_width])
    # Python's sort is stable and slots come in order, which is the tie rule that the proof asks for.
    gains = sorted(((gain, i) for i, survival in enumerate(capped) for gain in survival), key=lambda g: -g[0])
    n = len(capped)
    best_rate, best_rows, tokens = _rate_when_off(n, cost), 0, float(n)
    draft_seconds = cost.draft_seconds(n) if n else 0.0
    for rows, (gain, _) in enumerate(gains, start=1):
        tokens += gain
        rate = tokens / (draft_seconds + cost.target_seconds(n + rows))
        if rate > best_rate:
            best_rate, best_rows = rate, rows
    widths = [1] * n
    for _, i in gains[:best_rows]:
        widths[i] += 1
    return widths


def _shared_width(survivals: Sequence[Sequence[float]], cost: CostModel, allowed: Sequence[int]) -> list[int]:
    n = len(survivals)
    best_rate, best_width = _rate_when_off(n, cost), 1
    for width in sorted(allowed):
        tokens = n + sum(sum(survival[: width - 1]) for survival in survivals)
        rate = tokens / cost.step_seconds([width] * n) if n else 0.0
        if rate > best_rate:
            best_rate, best_width = rate, width
    return [best_width] * n


def _rate_when_off(n: int, cost: CostModel) -> float:
    return n / cost.target_seconds(n) if n else 0.0
