"""Results of a bench: runs, their medians over rounds, the comparisons of variants, and the report as JSON and HTML.

A published ratio such as NVIDIA's "15x" compares the curves of tokens/s/GPU against tokens/s/user at one tokens/s/user
(500 to 600 there), where the baseline can run only few users at once. It depends on that choice, so the report gives
the ratio at every point of the baseline's frontier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import floor, log10
from pathlib import Path
from statistics import median
from typing import Any

import numpy
from pydantic import Field, computed_field

from dflash_serve.bench.aiperf import Figures, RequestSettings
from dflash_serve.bench.settings import AUTO, OFF, BenchSettings, Cell, Variant
from dflash_serve.common.provenance import Environment
from dflash_serve.common.reports import UNKNOWN, counted, html_page, json_text, write_files
from dflash_serve.common.settings import Frozen
from dflash_serve.deployment.description import Deployment
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

JSON, HTML = "bench.json", "report.html"
SIDE_BY_SIDE = "over all concurrencies, at each all variants in turn, another one first each time; servers side by side"
IN_TURN = "over all variants, one server at a time, for each all concurrencies; another one first in each round"
KNOWN_COLOURS = {OFF: "#7b8794", AUTO: "#0b6bcb"}
OTHER_COLOURS = ("#d9730d", "#0f8a5f", "#9b3fb5", "#c0392b", "#8a6d00", "#00838f")
SWEEP = {"concurrency", "rounds", "requests_per_user", "min_requests", "warm_up"}


class Run(Figures):
    """One run: which it is, aiperf's figures, and what the engine's own metrics say of it."""

    variant: str
    concurrency: int
    round: int
    acceptance: AcceptanceStatistics
    """Read from the engine's metrics before and after, so that of this run; that of the answers (`told`) where there
    are no metrics."""
    workers: dict[str, AcceptanceStatistics] = Field(default={})
    """Acceptance of each worker behind a router, by the address of its metrics."""
    started: str
    """UTC."""
    commit: str | None
    """The commit of this program."""

    @property
    def cell(self) -> Cell:
        return Cell(self.variant, self.concurrency, self.round)

    def __str__(self) -> str:
        return f"{self.variant}, {counted(self.concurrency, 'user')}, round {self.round + 1}"


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
    workers: dict[str, AcceptanceStatistics] = Field(default={})
    """Acceptance of each worker over all rounds."""
    cut: int = 0
    """Streams that ended early, without a reason."""

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
    workers = dict.fromkeys(worker for run in runs for worker in run.workers)
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
        cut=sum(run.cut for run in runs),
        acceptance=total(run.acceptance for run in runs),
        workers={worker: total(run.workers[worker] for run in runs if worker in run.workers) for worker in workers},
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


@dataclass(frozen=True)
class ReportData:
    """BenchSettings and runs of a bench; every figure and sentence of the report is derived from them."""

    settings: BenchSettings
    request: RequestSettings
    variants: Mapping[str, Variant]
    runs: Sequence[Run]
    planned: int
    """Runs of a whole bench."""
    environment: Environment

    @cached_property
    def points(self) -> list[Point]:
        """Medians over rounds, by variant, then by concurrency."""
        return points_of(self.runs, self.devices, list(self.variants))

    @cached_property
    def curves(self) -> dict[str, list[Point]]:
        """The points of every variant that was measured; those whose interactivity is unknown are left out."""
        found: dict[str, list[Point]] = {}
        for point in self.points:
            found.setdefault(point.variant, []).extend([] if point.interactivity is None else [point])
        return found

    @property
    def baseline(self) -> str:
        """The variant that was named, else `off`, else the first."""
        return self.settings.baseline or (OFF if OFF in self.variants else next(iter(self.variants)))

    @cached_property
    def comparison(self) -> FrontierComparison | None:
        """At the interactivity that was asked for: of `auto` if there is one, else of the variant with the highest
        ratio. None = none was asked for, or there is nothing to compare.
        """
        at = self.settings.interactivity
        others = [name for name, points in self.curves.items() if points and name != self.baseline]
        if at is None or not self.curves.get(self.baseline):
            return None
        found = [compare(self.curves, name, self.baseline, at) for name in ([AUTO] if AUTO in others else others)]
        return max(found, key=lambda each: each.ratio or 0.0, default=None)

    @cached_property
    def loads(self) -> dict[str, list[LoadRatio]]:
        """The other variants against the baseline at every load."""
        others = [name for name in self.variants if name != self.baseline]
        found = {name: load_ratios(self.runs, name, self.baseline) for name in others}
        return {name: ratios for name, ratios in found.items() if ratios}

    @property
    def sentence(self) -> str:
        """The headline: the ratio at each load and its spread, of `auto` and other drafting methods than DFlash; of all
        where there is no `auto`."""
        if not self.loads:
            return "One variant was measured, so there is nothing to compare it with."
        named = list(self.loads)
        if AUTO in named:
            overlays = {text.partition("=")[0] for text in self.settings.variant}
            named = [AUTO, *(name for name in named if name in overlays)]
        told = [f"“{name}” against “{self.baseline}”, tokens/s: {_at_each(self.loads[name])}." for name in named]
        return " ".join([*told, *([] if self.comparison is None else [self.comparison.sentence()])])

    @cached_property
    def ratios(self) -> list[list[FrontierComparison]]:
        """The other variants at every interactivity of the baseline's frontier, lowest first."""
        others = [name for name in self.curves if name != self.baseline]
        line = [point.interactivity or 0.0 for point in frontier(self.curves.get(self.baseline, ()))]
        return [[compare(self.curves, name, self.baseline, at) for name in others] for at in line]

    @cached_property
    def deployed(self) -> dict[str, Deployment]:
        """Variants whose servers the bench started: the load generator ran on the same machine."""
        return {name: variant for name, variant in self.variants.items() if isinstance(variant, Deployment)}

    @property
    def devices(self) -> int:
        """Number of devices that throughput is divided by."""
        return self.settings.devices or next((each.hardware.count for each in self.deployed.values()), 1)

    @property
    def title(self) -> str:
        """The target that was deployed, else the variants."""
        return next((each.target.model for each in self.deployed.values()), ", ".join(self.variants))

    @property
    def order(self) -> str:
        """The order in which the runs were made."""
        return f"rounds {IN_TURN if self.settings.one_at_a_time else SIDE_BY_SIDE}"

    @property
    def commits(self) -> list[str]:
        """The commits of the runs; more than one where the bench was continued with another."""
        return list(dict.fromkeys(run.commit for run in self.runs if run.commit))

    @property
    def noisiest(self) -> tuple[float, Point] | None:
        """The point whose rounds differ most, and their spread over their median; None where that is at most 10 %."""
        spreads = [((point.highest - point.lowest) / point.throughput_per_device, point) for point in self.points]
        widest = max(spreads, key=lambda pair: pair[0], default=None)
        return widest if widest is not None and widest[0] > 0.1 else None

    @property
    def dates(self) -> list[str]:
        """Days of the runs, UTC."""
        return sorted({run.started[:10] for run in self.runs})

    @property
    def served(self) -> list[tuple[str, str]]:
        """Facts about the servers, as (term, description)."""
        engines = {run.variant: run.acceptance.engine or "unknown" for run in reversed(self.runs)}
        told: list[tuple[str, str]] = []
        # They differ in their widths only, and those without a drafter in how their engine drafts.
        for name, deployment in sorted(self.deployed.items(), key=lambda one: one[1].drafter is None)[:1]:
            most = deployment.limits.max_batch_size or "the engine's own number of"
            told += [
                ("Target", deployment.target.model),
                ("Drafter", deployment.drafter.model if deployment.drafter is not None else "none"),
                ("Variants", f"{', '.join(self.deployed)}; engine: {engines.get(name, 'unknown')}"),
                ("Limits", f"{most} users at once, {deployment.hardware.dtype} arithmetic"),
            ]
        for name, variant in self.variants.items():
            if name not in self.deployed:
                told.append((f"“{name}”", f"{variant}; engine: {engines.get(name, 'unknown')}"))
        return told


def _at_each(ratios: Sequence[LoadRatio]) -> str:
    words = [f"{each} at {counted(each.users, 'user')}" for each in ratios[:1]]
    return ", ".join([*words, *(f"{each} at {each.users}" for each in ratios[1:])])


def write_report(report: ReportData, folder: Path) -> list[Path]:
    """Writes JSON and HTML, each whole or not at all, and returns their paths.

    Raises:
        UserError: a file cannot be written.
    """
    return write_files(folder, {JSON: json_text(as_json(report)), HTML: as_html(report)})


def as_json(report: ReportData) -> dict[str, Any]:
    """All figures, for programs."""
    return {
        "sentence": report.sentence,
        "loads": {name: [each.model_dump() for each in ratios] for name, ratios in report.loads.items()},
        "comparison": report.comparison and report.comparison.model_dump(),
        "ratios": [[each.model_dump() for each in row] for row in report.ratios],
        "served": dict(report.served),
        "request": report.request.model_dump(),
        "sweep": report.settings.model_dump(mode="json", include=SWEEP),
        "order": report.order,
        "environment": report.environment.model_dump(),
        "commits": report.commits,
        "dates": report.dates,
        "devices": report.devices,
        "runs": {"done": len(report.runs), "planned": report.planned},
        "points": [
            {
                **point.model_dump(mode="json"),
                "acceptance": {**point.acceptance.to_dict(), **_quotients(point)},
                "workers": {
                    worker: {**counts.to_dict(), "acceptance_length": counts.acceptance_length}
                    for worker, counts in point.workers.items()
                },
            }
            for point in report.points
        ],
    }


def _quotients(point: Point) -> dict[str, Any]:
    return {"acceptance_length": point.acceptance.acceptance_length, "survival": point.survival or None}


def as_html(report: ReportData) -> str:
    """The report as one page, with its plot (SVG)."""
    best = {
        users: max((p.throughput_per_device for p in report.points if p.concurrency == users), default=None)
        for users in report.settings.concurrency
    }
    spots = [point for points in report.curves.values() for point in points]
    return html_page(
        "dflash_serve.bench",
        report=report,
        colours=colours(report.variants),
        best=best,
        unknown=UNKNOWN,
        frontier=frontier,
        right=_end_of_axis(point.interactivity or 0.0 for point in spots),
        top=_end_of_axis(point.throughput_per_device for point in spots),
    )


def colours(variants: Collection[str]) -> dict[str, str]:
    """A colour for each variant, the same in the plot and in the tables."""
    spare = iter(OTHER_COLOURS * (1 + len(variants) // len(OTHER_COLOURS)))
    return {name: KNOWN_COLOURS.get(name) or next(spare) for name in variants}


def _end_of_axis(values: Iterable[float]) -> float:
    # 1, 1.5, 2, 3, 5 or 8 times a power of ten, at least 5 % beyond the largest value.
    largest = max(values, default=0.0) or 1.0
    power = 10.0 ** floor(log10(largest))
    return power * next(step for step in (1, 1.5, 2, 3, 5, 8, 10, 15) if step * power >= 1.05 * largest)
