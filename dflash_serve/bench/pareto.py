"""The Pareto plot: the frontier of throughput against interactivity, the ratio of two frontiers, and the picture.

The ratio at one place is what NVIDIA's "15x" is: the curves of tokens/s/GPU against tokens/s/user are cut at one
tokens/s/user (500 to 600 there), far out where the baseline has to run few users at once. One number of many, so the
report tells it at every spot of the baseline as well.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

INK, SOFT, GRID = "#1f2933", "#66727f", "#e4e7eb"
KNOWN = {"off": "#7b8794", "auto": "#0b6bcb"}
OTHERS = ("#d9730d", "#0f8a5f", "#9b3fb5", "#c0392b", "#8a6d00", "#00838f")
STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans"],
    "font.size": 10.5,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "svg.fonttype": "path",
    "svg.hashsalt": "dflash-serve",
}


class Spot(NamedTuple):
    """Where one concurrency puts a variant."""

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
        """How many times the baseline's throughput."""
        if self.throughput is None or not self.baseline_throughput:
            return None
        return self.throughput / self.baseline_throughput

    def sentence(self) -> str:
        """What a reader takes away."""
        variant, baseline, at = self.variant, self.baseline, f"{self.interactivity:.1f} tokens/s/user"
        if self.ratio is not None:
            return (
                f"At {at}, “{variant}” serves {self.ratio:.2f} times the tokens/s/device of “{baseline}” "
                f"({self.throughput:.1f} against {self.baseline_throughput:.1f})."
            )
        if self.throughput is None and self.baseline_throughput is None:
            return f"Neither “{variant}” nor “{baseline}” reaches {at}."
        lame, other = (variant, baseline) if self.throughput is None else (baseline, variant)
        given = self.baseline_throughput if self.throughput is None else self.throughput
        return f"“{lame}” does not reach {at}; “{other}” serves {given:.1f} tokens/s/device there."


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
    return float(numpy.interp(interactivity, *_columns(line)))  # short of the first spot, that spot's


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
    """The comparison that somebody asked for: of `auto` where there is one, else of the variant with the highest ratio.

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


def draw_pareto(
    curves: Curves, colour: Mapping[str, str], comparison: FrontierComparison | None
) -> tuple[bytes, bytes]:
    """Tokens/s/device against tokens/s/user, a line for each variant, a mark for each concurrency.

    Args:
        colour: of each variant.
        comparison: marked by a dashed line where both variants reach its interactivity.

    Returns:
        The same picture as PNG, for a README, and as SVG, for the report.
    """
    from matplotlib import rc_context  # type: ignore[import-not-found, unused-ignore]
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    with rc_context(STYLE):  # type: ignore[arg-type, unused-ignore]
        figure = Figure(figsize=(8.6, 5.2), layout="constrained")
        axes = figure.add_subplot()
        for name, spots in curves.items():
            _draw(axes, spots, name, colour[name])
        if comparison is not None:
            _mark(axes, comparison)
        axes.set_xlabel("Interactivity: tokens/s that one user sees")
        axes.set_ylabel("Throughput: tokens/s/device")
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.margins(0.08)
        axes.tick_params(length=0)
        axes.legend(frameon=False, loc="best")
        return _saved(figure, "png", {"Software": None}), _saved(figure, "svg", {"Date": None})


def _draw(axes: Any, spots: Sequence[Spot], name: str, colour: str) -> None:
    axes.plot(*_columns(frontier(spots)), color=colour, linewidth=2.2, solid_capstyle="round", zorder=2)
    marks = {"marker": "o", "markersize": 6.5, "markeredgecolor": "white", "markeredgewidth": 1.2, "color": colour}
    axes.plot(*_columns(spots), linestyle="none", zorder=3, **marks)
    axes.plot([], [], linewidth=2.2, label=name, **marks)
    for x, y, users in spots:
        axes.annotate(str(users), (x, y), xytext=(5, 5), textcoords="offset points", fontsize=8.5, color=colour)


def _columns(spots: Sequence[Spot]) -> tuple[list[float], list[float]]:
    return [spot.interactivity for spot in spots], [spot.throughput for spot in spots]


def _mark(axes: Any, found: FrontierComparison) -> None:
    if found.ratio is None or found.throughput is None or found.baseline_throughput is None:
        return
    at = found.interactivity
    axes.plot([at, at], [found.baseline_throughput, found.throughput], color=INK, linewidth=1.2, linestyle=(0, (3, 2)))
    middle = (found.baseline_throughput + found.throughput) / 2
    words = f"{found.ratio:.2f}\N{MULTIPLICATION SIGN}"
    axes.annotate(words, (at, middle), xytext=(7, 0), textcoords="offset points", fontsize=12, fontweight="bold",
                  va="center", color=INK)  # fmt: skip


def _saved(figure: Any, form: str, metadata: Mapping[str, None]) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format=form, dpi=180, metadata=metadata)
    return out.getvalue()
