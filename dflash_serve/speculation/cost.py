"""What a step costs, as measured: seconds of the target's pass by rows, of the drafter's pass by requests."""

from bisect import bisect_left
from collections.abc import Mapping
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
