"""The Pareto plot, as PNG for a README and as SVG for the report."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

from dflash_serve.bench.pareto import FrontierComparison, Spot, frontier
from dflash_serve.bench.results import Point
from dflash_serve.errors import UserError

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


class Plot(NamedTuple):
    """The same picture in two formats."""

    png: bytes
    svg: bytes


def colours(variants: Sequence[str]) -> dict[str, str]:
    """A colour for each variant, the same in the plot and in the tables."""
    spare = iter(OTHERS * (1 + len(variants) // len(OTHERS)))
    return {name: KNOWN.get(name) or next(spare) for name in variants}


def draw_pareto(
    variants: Sequence[str], points: Sequence[Point], comparison: FrontierComparison | None, device: str = "device"
) -> Plot:
    """Tokens/s/device against tokens/s/user, a line for each variant, a mark for each concurrency.

    Args:
        comparison: marked by a dashed line where both variants reach its interactivity.
        device: what throughput is divided by, as a word.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context  # type: ignore[import-not-found, unused-ignore]
        from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise UserError("not installed", where="matplotlib", do="pip install 'dflash-serve[bench]'") from None
    with rc_context(STYLE):  # type: ignore[arg-type, unused-ignore]
        figure = Figure(figsize=(8.6, 5.2), layout="constrained")
        axes = figure.add_subplot()
        for name, colour in colours(variants).items():
            _draw(axes, [point for point in points if point.variant == name], name, colour)
        if comparison is not None:
            _mark(axes, comparison)
        axes.set_xlabel("Interactivity: tokens/s that one user sees")
        axes.set_ylabel(f"Throughput: tokens/s/{device}")
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.margins(0.08)
        axes.tick_params(length=0)
        axes.legend(frameon=False, loc="best")
        return Plot(_saved(figure, "png"), _saved(figure, "svg"))


def _draw(axes: Any, points: Sequence[Point], name: str, colour: str) -> None:
    shown = [(point, point.spot) for point in points if point.spot is not None]
    line = frontier([spot for _, spot in shown])
    axes.plot(*_columns(line), color=colour, linewidth=2.2, solid_capstyle="round", zorder=2)
    marks = {"marker": "o", "markersize": 6.5, "markeredgecolor": "white", "markeredgewidth": 1.2, "color": colour}
    axes.plot(*_columns([spot for _, spot in shown]), linestyle="none", zorder=3, **marks)
    axes.plot([], [], linewidth=2.2, label=name, **marks)
    for point, spot in shown:
        axes.annotate(
            str(point.concurrency), spot, xytext=(5, 5), textcoords="offset points", fontsize=8.5, color=colour
        )


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


def _saved(figure: Any, form: str) -> bytes:
    out = io.BytesIO()
    metadata = {"Date": None} if form == "svg" else {"Software": None}
    figure.savefig(out, format=form, dpi=180, metadata=metadata)
    return out.getvalue()
