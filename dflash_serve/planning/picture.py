"""The plan's Pareto picture: tokens/s/GPU over tokens/s/user for off, fixed and auto, their uncertainty, the limit."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from dflash_serve.bench.pareto import GRID, INK, SOFT, STYLE, colours
from dflash_serve.planning.plan import Plan
from dflash_serve.planning.prediction import OperatingPoint
from dflash_serve.planning.search import AUTO, OFF, front

LABELS = 7
"""Marks of a front that are labelled, at most."""


def draw(plan: Plan) -> tuple[bytes, bytes]:
    """The same picture as PNG, for a README, and as SVG, for the report."""
    from matplotlib import rc_context  # type: ignore[import-not-found, unused-ignore]
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    with rc_context(STYLE):  # type: ignore[arg-type, unused-ignore]
        figure = Figure(figsize=(8.6, 5.2), layout="constrained")
        axes = figure.add_subplot()
        colour = colours(plan.curves)
        for name, points in plan.curves.items():
            _draw(axes, plan, name, front(points), colour[name])
        _mark(axes, plan)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel("Interactivity: tokens/s that one user sees")
        axes.set_ylabel("Throughput: tokens/s/GPU")
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlim(left=0)
        axes.tick_params(length=0, which="both")
        axes.legend(frameon=False, loc="upper right")
        return _saved(figure, "png", {"Software": None}), _saved(figure, "svg", {"Date": None})


def band(plan: Plan, name: str) -> list[tuple[float, float, float]]:
    """(tokens/s/user, lowest, highest tokens/s/GPU) along a front: the error at the known acceptance, and where it is
    not known the outer curves of the band as well.
    """
    curves = plan.found.curves
    lows, highs = front(curves[0][name]), front(curves[-1][name])
    middle = front(plan.curves[name])
    found = []
    for point in middle:
        off = plan.error(point)
        low = (
            _at(lows, point.interactivity * (1 + off)) * (1 - off) if len(curves) > 1 else point.throughput * (1 - off)
        )
        high = _at(highs, point.interactivity) * (1 + off) if len(curves) > 1 else point.throughput * (1 + off)
        found.append((point.interactivity, low or min(each.throughput for each in lows), high))
    return found


def _at(points: Sequence[OperatingPoint], interactivity: float) -> float:
    return max((point.throughput for point in points if point.interactivity >= interactivity), default=0.0)


def _draw(axes: Any, plan: Plan, name: str, points: Sequence[OperatingPoint], colour: str) -> None:
    x, y = [point.interactivity for point in points], [point.throughput for point in points]
    edges = band(plan, name)
    axes.fill_between(
        [e[0] for e in edges], [e[1] for e in edges], [e[2] for e in edges], color=colour, alpha=0.12, lw=0
    )
    marks = {"marker": "o", "markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 1.0}
    axes.plot(x, y, color=colour, linewidth=2.2, solid_capstyle="round", label=name, zorder=3, **marks)
    every = max(1, -(-len(points) // LABELS))
    below = name == OFF
    for point in points[::every]:
        words = f"{point.batch}" + (f" w{point.width}" if name == AUTO else "")
        place, offset = ("right", (-6, -11)) if below else ("left", (5, 5) if name == AUTO else (0, -14))
        axes.annotate(words, (point.interactivity, point.throughput), xytext=offset, textcoords="offset points",
                      fontsize=8, color=colour, ha=place)  # fmt: skip


def _mark(axes: Any, plan: Plan) -> None:
    limit = plan.question.objective.interactivity
    if limit is not None:
        axes.axvline(limit, color=INK, linewidth=1.2, linestyle=(0, (3, 2)), zorder=1)
        axes.annotate(f"at least {limit:g}", (limit, 1), xycoords=("data", "axes fraction"), xytext=(5, -12),
                      textcoords="offset points", fontsize=9, color=SOFT)  # fmt: skip
    chosen = plan.chosen
    axes.plot([chosen.interactivity], [chosen.throughput], marker="o", markersize=13, markerfacecolor="none",
              markeredgecolor=INK, markeredgewidth=1.4, linestyle="none", label="planned", zorder=4)  # fmt: skip


def _saved(figure: Any, form: str, metadata: dict[str, None]) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format=form, dpi=180, metadata=metadata)
    return out.getvalue()
