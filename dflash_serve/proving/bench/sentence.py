"""The one sentence: how much more throughput at equal interactivity.

It is the ratio that NVIDIA's "15x" is: the curves of tokens/s/GPU against tokens/s/user are cut at one tokens/s/user
(500 to 600 there), far out where the baseline has to run few users at once. One number of many, so the report
tells it at every spot of the baseline as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflash_serve.proving.bench.pareto import Spot, frontier, reach, throughput_at
from dflash_serve.proving.bench.results import Point


@dataclass(frozen=True)
class Comparison:
    """A way against the baseline at one interactivity. Unknown is None."""

    way: str
    baseline: str
    interactivity: float
    throughput: float | None
    """None = the way does not reach that interactivity."""
    baseline_throughput: float | None

    @property
    def ratio(self) -> float | None:
        """How much more."""
        if self.throughput is None or not self.baseline_throughput:
            return None
        return self.throughput / self.baseline_throughput


def curves(points: Sequence[Point]) -> dict[str, list[Spot]]:
    """Each way's spots, in the order of the points."""
    found: dict[str, list[Spot]] = {}
    for point in points:
        found.setdefault(point.way, [])
        if point.spot is not None:
            found[point.way].append(point.spot)
    return found


def common_interactivity(spots: Mapping[str, Sequence[Spot]], way: str, baseline: str) -> float | None:
    """The most tokens/s/user that both reach: the far end of the slower curve."""
    reaches = [found for name in (way, baseline) if (found := reach(spots.get(name, ()))) is not None]
    return min(reaches) if len(reaches) == 2 else None


def compare(spots: Mapping[str, Sequence[Spot]], way: str, baseline: str, interactivity: float) -> Comparison:
    """Both ways, interpolated on their frontiers."""
    reached, reference = (throughput_at(spots.get(name, ()), interactivity) for name in (way, baseline))
    return Comparison(way, baseline, interactivity, reached, reference)


def at_every_spot(spots: Mapping[str, Sequence[Spot]], baseline: str) -> list[list[Comparison]]:
    """The other ways at every interactivity of the baseline's frontier, lowest first."""
    others = [way for way in spots if way != baseline]
    line = frontier(spots.get(baseline, ()))
    return [[compare(spots, way, baseline, spot.interactivity) for way in others] for spot in line]


def sentence(comparison: Comparison, device: str) -> str:
    """What a reader takes away."""
    way, baseline, at = comparison.way, comparison.baseline, f"{comparison.interactivity:.1f} tokens/s/user"
    if comparison.ratio is not None:
        return (
            f"At {at}, “{way}” serves {comparison.ratio:.2f} times the tokens/s/{device} of “{baseline}” "
            f"({comparison.throughput:.1f} against {comparison.baseline_throughput:.1f})."
        )
    if comparison.throughput is None and comparison.baseline_throughput is None:
        return f"Neither “{way}” nor “{baseline}” reaches {at}."
    lame, other = (way, baseline) if comparison.throughput is None else (baseline, way)
    given = comparison.baseline_throughput if comparison.throughput is None else comparison.throughput
    return f"“{lame}” does not reach {at}; “{other}” serves {given:.1f} tokens/s/{device} there."


def headline(
    points: Sequence[Point], *, baseline: str, way: str | None, interactivity: float | None, device: str
) -> tuple[Comparison | None, str]:
    """The comparison of the first line, and its sentence.

    Args:
        points: of all ways.
        baseline: what is compared with.
        way: what is compared; None = `auto` where there is one, else the way with most throughput at that spot.
        interactivity: tokens/s/user; None = the most that both reach.
        device: what throughput is divided by, as a word.
    """
    spots = curves(points)
    others = [name for name in spots if name != baseline and spots[name]]
    candidates = [way] if way in others else ["auto"] if "auto" in others else others
    found = []
    for name in candidates:
        at = interactivity if interactivity is not None else common_interactivity(spots, name, baseline)
        if at is not None:
            found.append(compare(spots, name, baseline, at))
    if not found:
        return None, "One way was measured, so there is nothing to compare it with."
    best = max(found, key=lambda each: each.ratio or 0.0)
    return best, sentence(best, device)
