"""The Pareto plot: frontiers of throughput against interactivity, their ratio, and the SVG.

A published ratio such as NVIDIA's "15x" compares the curves of tokens/s/GPU against tokens/s/user at one tokens/s/user
(500 to 600 there), where the baseline can run only few users at once. It depends on that choice, so the report gives
the ratio at every spot of the baseline.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10
from typing import NamedTuple

import numpy

TIMES = "\N{MULTIPLICATION SIGN}"
INK, SOFT, GRID = "#1f2933", "#66727f", "#e4e7eb"
KNOWN = {"off": "#7b8794", "auto": "#0b6bcb"}
OTHERS = ("#d9730d", "#0f8a5f", "#9b3fb5", "#c0392b", "#8a6d00", "#00838f")
WIDTH, HEIGHT, MARGIN, TICKS = 860, 520, 62, 5
"""Size of the picture in pixels; intervals of each axis."""


class Spot(NamedTuple):
    """Throughput and interactivity of a variant at one concurrency."""

    interactivity: float
    """Tokens/s that one user sees."""
    throughput: float
    """Tokens/s of one device."""
    users: int = 1
    """The concurrency: its mark's label in the picture."""


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
        """Throughput over the baseline's."""
        if self.throughput is None or not self.baseline_throughput:
            return None
        return self.throughput / self.baseline_throughput

    def sentence(self) -> str:
        """The comparison in one sentence."""
        variant, baseline, at = self.variant, self.baseline, f"{self.interactivity:.1f} tokens/s/user"
        if self.ratio is not None:
            return (
                f"At {at}, “{variant}” serves {self.ratio:.2f} times the tokens/s/device of “{baseline}” "
                f"({self.throughput:.1f} against {self.baseline_throughput:.1f})."
            )
        if self.throughput is None and self.baseline_throughput is None:
            return f"Neither “{variant}” nor “{baseline}” reaches {at}."
        slower, other = (variant, baseline) if self.throughput is None else (baseline, variant)
        given = self.baseline_throughput if self.throughput is None else self.throughput
        return f"“{slower}” does not reach {at}; “{other}” serves {given:.1f} tokens/s/device there."


def frontier(spots: Sequence[Spot]) -> list[Spot]:
    """Spots that no other spot beats in both figures, by rising interactivity (and so by falling throughput)."""
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
    users, devices = ([spot[axis] for spot in line] for axis in (0, 1))
    return float(numpy.interp(interactivity, users, devices))  # below the first spot: that spot's throughput


def compare(curves: Curves, variant: str, baseline: str, interactivity: float) -> FrontierComparison:
    """Both variants at one interactivity, interpolated on their frontiers."""
    reached, reference = (throughput_at(curves.get(name, ()), interactivity) for name in (variant, baseline))
    return FrontierComparison(variant, baseline, interactivity, reached, reference)


def at_every_spot(curves: Curves, baseline: str) -> list[list[FrontierComparison]]:
    """The other variants at every interactivity of the baseline's frontier, lowest first."""
    others = [name for name in curves if name != baseline]
    line = frontier(curves.get(baseline, ()))
    return [[compare(curves, name, baseline, spot.interactivity) for name in others] for spot in line]


def cut(curves: Curves, baseline: str, interactivity: float) -> FrontierComparison | None:
    """The comparison at a given interactivity: of `auto` if there is one, else of the variant with the highest ratio.

    Returns:
        None where fewer than two variants have spots.
    """
    others = [name for name, spots in curves.items() if spots and name != baseline]
    if not curves.get(baseline):
        return None
    named = ["auto"] if "auto" in others else others
    found = [compare(curves, name, baseline, interactivity) for name in named]
    return max(found, key=lambda each: each.ratio or 0.0, default=None)


def colours(variants: Collection[str]) -> dict[str, str]:
    """A colour for each variant, the same in the plot and in the tables."""
    spare = iter(OTHERS * (1 + len(variants) // len(OTHERS)))
    return {name: KNOWN.get(name) or next(spare) for name in variants}


def draw_pareto(curves: Curves, colour: Mapping[str, str], comparison: FrontierComparison | None) -> str:
    """Tokens/s/device against tokens/s/user as SVG: a line for each variant's frontier, a mark for each concurrency.

    Args:
        colour: of each variant.
        comparison: marked by a dashed line where both variants reach its interactivity.
    """
    every = [spot for spots in curves.values() for spot in spots]
    right, top = (_round_up(max((spot[axis] for spot in every), default=0.0) or 1.0) for axis in (0, 1))
    parts = [*_axes(right, top), *_legend(curves, colour)]
    for name, spots in curves.items():
        placed = [_place(spot.interactivity / right, spot.throughput / top) for spot in spots]
        line = " ".join(f"{x},{y}" for x, y in (_place(s[0] / right, s[1] / top) for s in frontier(spots)))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour[name]}" stroke-width="2.5"/>')
        for (x, y), spot in zip(placed, spots, strict=True):
            parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour[name]}" stroke="#fff"/>')
            parts.append(f'<text x="{x + 6}" y="{y - 6}" fill="{colour[name]}">{spot.users}</text>')
    if comparison is not None and comparison.ratio is not None:
        at = comparison.interactivity / right
        both = (comparison.baseline_throughput or 0.0, comparison.throughput or 0.0)
        (x, low), (_, high) = (_place(at, y / top) for y in both)
        parts.append(f'<path d="M{x} {low}V{high}" stroke="{INK}" stroke-dasharray="4 3"/>')
        parts.append(
            f'<text x="{x + 7}" y="{(low + high) / 2:.1f}" font-weight="bold">{comparison.ratio:.2f}{TIMES}</text>'
        )
    names = escape(", ".join(curves))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Throughput against interactivity for {names}" '
        f'fill="{INK}" font-size="12">{"".join(parts)}</svg>'
    )


def _place(x: float, y: float) -> tuple[float, float]:
    # Shares of the axes -> coordinates in the picture.
    left, bottom = MARGIN, HEIGHT - MARGIN
    return round(left + x * (WIDTH - MARGIN - 20), 1), round(bottom - y * (bottom - 10), 1)


def _round_up(value: float) -> float:
    # The end of an axis: 1, 1.5, 2, 3, 5 or 8 times a power of ten, at least 5 % beyond the largest value.
    power = 10.0 ** floor(log10(value))
    return power * next(step for step in (1, 1.5, 2, 3, 5, 8, 10, 15) if step * power >= 1.05 * value)


def _axes(right: float, top: float) -> Iterator[str]:
    for part in range(TICKS + 1):
        share = part / TICKS
        (x, bottom), (_, ceiling) = _place(share, 0), _place(share, 1)
        (left, y), (end, _) = _place(0, share), _place(1, share)
        yield f'<path d="M{x} {bottom}V{ceiling}M{left} {y}H{end}" stroke="{GRID}" fill="none"/>'
        yield f'<text x="{x}" y="{bottom + 18}" text-anchor="middle" fill="{SOFT}">{share * right:g}</text>'
        yield f'<text x="{left - 8}" y="{y + 4}" text-anchor="end" fill="{SOFT}">{share * top:g}</text>'
    for place, words in (
        (f"translate({WIDTH / 2} {HEIGHT - 8})", "Interactivity: tokens/s that one user sees"),
        (f"translate(14 {HEIGHT / 2}) rotate(-90)", "Throughput: tokens/s/device"),
    ):
        yield f'<text transform="{place}" text-anchor="middle">{words}</text>'


def _legend(curves: Curves, colour: Mapping[str, str]) -> Iterator[str]:
    for place, name in enumerate(curves):
        y = 28 + 20 * place
        yield f'<circle cx="{WIDTH - 150}" cy="{y - 4}" r="5" fill="{colour[name]}"/>'
        yield f'<text x="{WIDTH - 138}" y="{y}">{escape(name)}</text>'
