"""The frontier of throughput against interactivity, and the one sentence: the ratio of two frontiers at one place.

It is the ratio that NVIDIA's "15x" is: the curves of tokens/s/GPU against tokens/s/user are cut at one tokens/s/user
(500 to 600 there), far out where the baseline has to run few users at once. One number of many, so the report
tells it at every spot of the baseline as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Spot(NamedTuple):
    """Where one concurrency puts a variant."""

    interactivity: float
    """Tokens/s that one user sees."""
    throughput: float
    """Tokens/s of one device."""


Curves = Mapping[str, Sequence[Spot]]
"""Each variant's spots."""


@dataclass(frozen=True)
class FrontierComparison:
    """A variant against the baseline at one interactivity. Unknown is None."""

    variant: str
    baseline: str
    interactivity: float
    throughput: float | None
    """None = the variant does not reach that interactivity."""
    baseline_throughput: float | None

    @property
    def ratio(self) -> float | None:
        """How many times the baseline's throughput."""
        if self.throughput is None or not self.baseline_throughput:
            return None
        return self.throughput / self.baseline_throughput

    def sentence(self, device: str) -> str:
        """What a reader takes away; `device` is the word for what throughput is divided by."""
        variant, baseline, at = self.variant, self.baseline, f"{self.interactivity:.1f} tokens/s/user"
        if self.ratio is not None:
            return (
                f"At {at}, “{variant}” serves {self.ratio:.2f} times the tokens/s/{device} of “{baseline}” "
                f"({self.throughput:.1f} against {self.baseline_throughput:.1f})."
            )
        if self.throughput is None and self.baseline_throughput is None:
            return f"Neither “{variant}” nor “{baseline}” reaches {at}."
        lame, other = (variant, baseline) if self.throughput is None else (baseline, variant)
        given = self.baseline_throughput if self.throughput is None else self.throughput
        return f"“{lame}” does not reach {at}; “{other}” serves {given:.1f} tokens/s/{device} there."


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


def common_interactivity(curves: Curves, variant: str, baseline: str) -> float | None:
    """The most tokens/s/user that both reach: the far end of the slower curve."""
    reaches = [found for name in (variant, baseline) if (found := reach(curves.get(name, ()))) is not None]
    return min(reaches) if len(reaches) == 2 else None


def compare(curves: Curves, variant: str, baseline: str, interactivity: float) -> FrontierComparison:
    """Both variants at one interactivity, interpolated on their frontiers."""
    reached, reference = (throughput_at(curves.get(name, ()), interactivity) for name in (variant, baseline))
    return FrontierComparison(variant, baseline, interactivity, reached, reference)


def at_every_spot(curves: Curves, baseline: str) -> list[list[FrontierComparison]]:
    """The other variants at every interactivity of the baseline's frontier, lowest first."""
    others = [name for name in curves if name != baseline]
    line = frontier(curves.get(baseline, ()))
    return [[compare(curves, name, baseline, spot.interactivity) for name in others] for spot in line]


def headline(curves: Curves, baseline: str, interactivity: float | None) -> FrontierComparison | None:
    """The comparison of the first line: of `auto` where there is one, else of the variant with the highest ratio.

    Args:
        interactivity: tokens/s/user; None = the most that both reach.

    Returns:
        None where fewer than two variants have spots.
    """
    others = [name for name in curves if name != baseline and curves[name]]
    found = []
    for name in ["auto"] if "auto" in others else others:
        at = interactivity if interactivity is not None else common_interactivity(curves, name, baseline)
        if at is not None:
            found.append(compare(curves, name, baseline, at))
    return max(found, key=lambda each: each.ratio or 0.0, default=None)
