"""The frontier of throughput against interactivity, and the ratio of two frontiers at one interactivity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Spot(NamedTuple):
    """Where one concurrency puts a way."""

    interactivity: float
    """Tokens/s that one user sees."""
    throughput: float
    """Tokens/s of one device."""


def frontier(spots: Sequence[Spot]) -> list[Spot]:
    """Those that no other beats in both, by rising interactivity (and so by falling throughput)."""
    best: list[Spot] = []
    for spot in sorted(spots, key=lambda spot: (-spot.interactivity, -spot.throughput)):
        if not best or spot.throughput > best[-1].throughput:
            best.append(spot)
    return best[::-1]


def throughput_at(spots: Sequence[Spot], interactivity: float) -> float | None:
    """The highest throughput that still gives every user that many tokens/s; None where no spot gives that many.

    Between two spots of the frontier it is interpolated on the straight line that joins them.
    """
    line = frontier(spots)
    if not line or interactivity > line[-1].interactivity:
        return None
    if interactivity <= line[0].interactivity:
        return line[0].throughput
    after = next(place for place, spot in enumerate(line) if spot.interactivity >= interactivity)
    left, right = line[after - 1], line[after]
    share = (interactivity - left.interactivity) / (right.interactivity - left.interactivity)
    return left.throughput + share * (right.throughput - left.throughput)


def reach(spots: Sequence[Spot]) -> float | None:
    """The most tokens/s that any user saw."""
    return max((spot.interactivity for spot in spots), default=None)
