"""Runs of a bench, their medians over rounds, and the comparisons of variants at equal load and equal interactivity.

A published ratio such as NVIDIA's "15x" compares the curves of tokens/s/GPU against tokens/s/user at one tokens/s/user
(500 to 600 there), where the baseline can run only few users at once. It depends on that choice, so the report gives
the ratio at every point of the baseline's frontier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from statistics import median

import numpy
from pydantic import computed_field

from dflash_serve.bench.aiperf import Figures
from dflash_serve.bench.settings import Cell
from dflash_serve.common.settings import Frozen
from dflash_serve.speculation.statistics import AcceptanceStatistics, total


class Run(Figures):
    """One run: which it is, aiperf's figures, and what the engine's own metrics say of it."""

    variant: str
    concurrency: int
    round: int
    acceptance: AcceptanceStatistics
    """Read from the engine's metrics before and after: what happened in this run."""
    started: str
    """UTC."""
    commit: str | None
    """The commit of this program."""

    @property
    def cell(self) -> Cell:
        return Cell(self.variant, self.concurrency, self.round)


class Point(Frozen):
    """A variant at a concurrency: medians over rounds."""

    variant: str
    concurrency: int
    rounds: int
    throughput_per_device: float
    lowest: float
    """The slowest round's throughput per device."""
    highest: float
    """The fastest round's throughput per device."""
    interactivity: float | None
    first_token_ms: float | None
    first_token_p99_ms: float | None
    inter_token_ms: float | None
    requests: int
    errors: int
    acceptance: AcceptanceStatistics
    """Over all rounds."""

    @property
    def survival(self) -> list[float]:
        """P(slot k is accepted) from slot 1 on, up to the first slot that was never offered."""
        known = []
        for share in self.acceptance.survival():
            if share is None:
                break
            known.append(share)
        return known

    @property
    def mean_width(self) -> float | None:
        """Slots verified a step, the anchor counted, steps without speculation included; None where it is not told."""
        widths, steps = self.acceptance.widths or {}, self.acceptance.steps
        return sum(width * count for width, count in widths.items()) / steps if steps else None


Curves = Mapping[str, Sequence[Point]]
"""The points of each variant whose interactivity is known."""


def points_of(runs: Iterable[Run], devices: int, variants: Sequence[str]) -> list[Point]:
    """Medians over rounds, by variant in the order of `variants`, then by concurrency."""

    def place(run: Run) -> tuple[int, int]:
        return variants.index(run.variant), run.concurrency

    return [_point(list(rounds), devices) for _, rounds in groupby(sorted(runs, key=place), place)]


def _point(runs: Sequence[Run], devices: int) -> Point:
    rates = [run.throughput / devices for run in runs]
    return Point(
        variant=runs[0].variant,
        concurrency=runs[0].concurrency,
        rounds=len(runs),
        throughput_per_device=median(rates),
        lowest=min(rates),
        highest=max(rates),
        interactivity=_median(run.interactivity for run in runs),
        first_token_ms=_median(run.first_token_ms for run in runs),
        first_token_p99_ms=_median(run.first_token_p99_ms for run in runs),
        inter_token_ms=_median(run.inter_token_ms for run in runs),
        requests=sum(run.requests for run in runs),
        errors=sum(run.errors for run in runs),
        acceptance=total(run.acceptance for run in runs),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


class LoadRatio(Frozen):
    """A variant against the baseline with as many users: tokens/s by the baseline's, round by round."""

    variant: str
    baseline: str
    users: int
    ratio: float
    """Median over rounds."""
    lowest: float
    highest: float
    rounds: int

    def __str__(self) -> str:
        spread = f" ({self.lowest:.2f} to {self.highest:.2f})" if self.rounds > 1 else ""
        return f"{self.ratio:.2f}\N{MULTIPLICATION SIGN}{spread}"


def load_ratios(runs: Iterable[Run], variant: str, baseline: str) -> list[LoadRatio]:
    """At every concurrency that both were measured at, lowest first; rounds that both have."""
    rates = {run.cell: run.throughput for run in runs}
    found: dict[int, list[float]] = {}
    for cell, rate in sorted(rates.items(), key=lambda item: (item[0].concurrency, item[0].round)):
        reference = rates.get(cell._replace(variant=baseline))
        if cell.variant == variant and reference:
            found.setdefault(cell.concurrency, []).append(rate / reference)
    return [
        LoadRatio(
            variant=variant,
            baseline=baseline,
            users=users,
            ratio=median(each),
            lowest=min(each),
            highest=max(each),
            rounds=len(each),
        )
        for users, each in found.items()
    ]


class FrontierComparison(Frozen):
    """A variant against the baseline at one interactivity. Unknown is None."""

    variant: str
    baseline: str
    interactivity: float
    throughput: float | None
    """None = the variant does not reach that interactivity."""
    baseline_throughput: float | None

    @computed_field  # type: ignore[prop-decorator]
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


def frontier(points: Iterable[Point]) -> list[Point]:
    """Points that no other beats in both figures, by rising interactivity (and so by falling throughput)."""
    best: list[Point] = []
    for point in sorted(points, key=_figures, reverse=True):
        if not best or point.throughput_per_device > best[-1].throughput_per_device:
            best.append(point)
    return best[::-1]


def _figures(point: Point) -> tuple[float, float]:
    return point.interactivity or 0.0, point.throughput_per_device


def throughput_at(points: Iterable[Point], interactivity: float) -> float | None:
    """The highest throughput per device that still gives every user that many tokens/s; None where none does.

    Between two points of the frontier it is interpolated on the straight line that joins them.
    """
    line = frontier(points)
    if not line or interactivity > (line[-1].interactivity or 0.0):
        return None
    users, devices = zip(*map(_figures, line), strict=True)
    return float(numpy.interp(interactivity, users, devices))  # below the first point: that point's throughput


def compare(curves: Curves, variant: str, baseline: str, interactivity: float) -> FrontierComparison:
    """Both variants at one interactivity, interpolated on their frontiers."""
    reached, reference = (throughput_at(curves.get(name, ()), interactivity) for name in (variant, baseline))
    return FrontierComparison(
        variant=variant,
        baseline=baseline,
        interactivity=interactivity,
        throughput=reached,
        baseline_throughput=reference,
    )
