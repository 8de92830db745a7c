"""How often drafts were accepted, and how far: the one figure that predictions and observations share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_serve.client.engine_metrics import AcceptanceReading
from dflash_serve.speculation.statistics import AcceptanceStatistics


@dataclass(frozen=True)
class Counts:
    """Verifications of at least one drafted token, of one prompt or of many."""

    steps: int
    accepted: int
    """Drafted tokens accepted in all of them, bonus tokens not counted."""
    reached: tuple[int, ...] | None = None
    """By slot k = 1..B-1: steps that accepted slot k; None = unknown."""

    @classmethod
    def of(cls, statistics: AcceptanceStatistics, width: int) -> Counts:
        """From our own loop."""
        tally = {key: steps for key, steps in statistics.tally.items() if key[0] > 1}
        reached = tuple(sum(n for (_, gained), n in tally.items() if gained >= slot) for slot in range(1, width))
        return cls(sum(tally.values()), sum(reached), reached)

    @classmethod
    def read(cls, reading: AcceptanceReading, width: int) -> Counts | None:
        """From an engine's metrics; None where it does not count."""
        if not reading.steps or reading.accepted is None:
            return None
        slots = reading.accepted_by_slot
        reached = None if slots is None else tuple(round(n) for n in (*slots, *[0.0] * width)[: width - 1])
        return cls(round(reading.steps), round(reading.accepted), reached)

    @property
    def length(self) -> float:
        """τ: tokens gained a step, the bonus token counted."""
        return 1 + self.accepted / self.steps if self.steps else math.nan

    @property
    def survival(self) -> list[float] | None:
        """By slot: share of steps that accepted it."""
        return None if self.reached is None or not self.steps else [n / self.steps for n in self.reached]

    def to_list(self) -> list[Any]:
        """For JSON."""
        return [self.steps, self.accepted, None if self.reached is None else list(self.reached)]

    @classmethod
    def from_list(cls, given: Sequence[Any]) -> Counts:
        """The inverse of `to_list`."""
        return cls(given[0], given[1], None if given[2] is None else tuple(given[2]))


def total(each: Iterable[Counts]) -> Counts:
    """All of them together; slots are known where all know them."""
    many = list(each)
    known = [one.reached for one in many if one.reached is not None]
    reached = tuple(map(sum, zip(*known, strict=True))) if known and len(known) == len(many) else None
    return Counts(sum(one.steps for one in many), sum(one.accepted for one in many), reached)


def length_error(each: Sequence[Counts]) -> float | None:
    """Standard error of τ over prompts (jackknife: prompts differ far more than steps of one prompt)."""
    whole, count = total(each), len(each)
    if count < 2 or any(one.steps == whole.steps for one in each):
        return None
    without = [1 + (whole.accepted - one.accepted) / (whole.steps - one.steps) for one in each]
    middle = sum(without) / count
    return math.sqrt((count - 1) / count * sum((length - middle) ** 2 for length in without))
