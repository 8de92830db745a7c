"""The report of a finished or interrupted bench: all figures in one value, written as JSON and HTML."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from math import floor, log10
from pathlib import Path
from typing import Any

from dflash_serve.bench.aiperf import RequestSettings
from dflash_serve.bench.results import (
    FrontierComparison,
    LoadRatio,
    Point,
    Run,
    compare,
    frontier,
    load_ratios,
    points_of,
)
from dflash_serve.bench.settings import AUTO, OFF, Settings, Variant
from dflash_serve.common.files import write_whole
from dflash_serve.common.provenance import Environment
from dflash_serve.deployment import Deployment

JSON, HTML, TEMPLATE = "bench.json", "report.html", "report.html.jinja"
UNKNOWN = "\N{EN DASH}"
SIDE_BY_SIDE = "over all concurrencies, at each all variants in turn, another one first each time; servers side by side"
IN_TURN = "over all variants, one server at a time, for each all concurrencies; another one first in each round"
KNOWN_COLOURS = {OFF: "#7b8794", AUTO: "#0b6bcb"}
OTHER_COLOURS = ("#d9730d", "#0f8a5f", "#9b3fb5", "#c0392b", "#8a6d00", "#00838f")
SWEEP = {"concurrency", "rounds", "requests_per_user", "min_requests", "warm_up"}


@dataclass(frozen=True)
class ReportData:
    """Settings and runs of a bench; every figure and sentence of the report is derived from them."""

    settings: Settings
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
    words = [f"{each} at {each.users}" + (" user" if each.users == 1 else " users") for each in ratios[:1]]
    return ", ".join([*words, *(f"{each} at {each.users}" for each in ratios[1:])])


def write_report(report: ReportData, folder: Path) -> list[Path]:
    """Writes JSON and HTML, each whole or not at all, and returns their paths.

    Raises:
        UserError: a file cannot be written.
    """
    contents = {JSON: json.dumps(as_json(report), indent=1, ensure_ascii=False) + "\n", HTML: as_html(report)}
    for name, content in contents.items():
        write_whole(folder / name, content, do="name another --output")
    return [folder / name for name in contents]


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
        "points": [_point(point) for point in report.points],
    }


def _point(point: Point) -> dict[str, Any]:
    quotients = {"acceptance_length": point.acceptance.acceptance_length, "survival": point.survival or None}
    return {**point.model_dump(mode="json"), "acceptance": {**point.acceptance.to_dict(), **quotients}}


def as_html(report: ReportData) -> str:
    """One HTML document that needs no network: style and plot (SVG) are inside it."""
    from jinja2 import Environment, StrictUndefined

    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.filters.update(figure=_figure, counted=_counted)
    best = {
        users: max((p.throughput_per_device for p in report.points if p.concurrency == users), default=None)
        for users in report.settings.concurrency
    }
    spots = [point for points in report.curves.values() for point in points]
    return jinja.from_string((files(__package__) / TEMPLATE).read_text(encoding="utf-8")).render(
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


def _figure(value: float | None, digits: int = 1, unit: str = "") -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}{unit}"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")
