"""The report of a finished or interrupted bench: all figures in one value, written as JSON and HTML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from dflash_serve.bench.aiperf import RequestSettings
from dflash_serve.bench.pareto import FrontierComparison, Spot, at_every_spot, colours, cut, draw_pareto
from dflash_serve.bench.results import LoadRatio, Point, Run, load_ratios, points_of
from dflash_serve.bench.settings import AUTO, OFF, Settings, Variant
from dflash_serve.common.files import write_whole
from dflash_serve.common.provenance import Environment
from dflash_serve.deployment import Deployment
from dflash_serve.draft_method import METHODS

JSON, HTML, TEMPLATE = "bench.json", "report.html", "report.html.jinja"
UNKNOWN = "\N{EN DASH}"
SIDE_BY_SIDE = "over all concurrencies, at each all variants in turn, another one first each time; servers side by side"
IN_TURN = "over all variants, one server at a time, for each all concurrencies; another one first in each round"
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
    def curves(self) -> dict[str, list[Spot]]:
        """The spots of every variant that was measured."""
        found: dict[str, list[Spot]] = {}
        for point in self.points:
            found.setdefault(point.variant, []).extend([] if point.spot is None else [point.spot])
        return found

    @property
    def baseline(self) -> str:
        """The variant that was named, else `off`, else the first."""
        return self.settings.baseline or (OFF if OFF in self.variants else next(iter(self.variants)))

    @cached_property
    def comparison(self) -> FrontierComparison | None:
        """At the one interactivity that was asked for; None = none was."""
        at = self.settings.interactivity
        return None if at is None else cut(self.curves, self.baseline, at)

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
            named = [AUTO, *(name for name in named if name.partition(":")[0] in METHODS)]
        told = [f"“{name}” against “{self.baseline}”, tokens/s: {_at_each(self.loads[name])}." for name in named]
        return " ".join([*told, *([] if self.comparison is None else [self.comparison.sentence()])])

    @cached_property
    def ratios(self) -> list[list[FrontierComparison]]:
        """The other variants at every interactivity of the baseline's frontier."""
        return at_every_spot(self.curves, self.baseline)

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
    comparison = report.comparison
    return {
        "sentence": report.sentence,
        "loads": {name: [each.model_dump() for each in ratios] for name, ratios in report.loads.items()},
        "comparison": comparison and {**asdict(comparison), "ratio": comparison.ratio},
        "ratios": [[{**asdict(each), "ratio": each.ratio} for each in row] for row in report.ratios],
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
    colour = colours(report.variants)
    best = {
        users: max((p.throughput_per_device for p in report.points if p.concurrency == users), default=None)
        for users in report.settings.concurrency
    }
    return jinja.from_string((files(__package__) / TEMPLATE).read_text(encoding="utf-8")).render(
        report=report,
        plot=draw_pareto(report.curves, colour, report.comparison),
        colours=colour,
        best=best,
        caveats=list(caveats(report)),
        unknown=UNKNOWN,
    )


def _figure(value: float | None, digits: int = 1, unit: str = "") -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}{unit}"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


def caveats(report: ReportData) -> Iterator[str]:
    """Warnings about these runs, one sentence each."""
    done, others = len(report.runs), [point for point in report.points if point.variant != report.baseline]
    if done < report.planned:
        yield f"Incomplete: {done} of {report.planned} runs are done. The same command continues it."
    if report.settings.rounds == 1:
        yield "One round: the scatter of the figures is unknown."
    yield from _scatter(report.points)
    errors = sum(point.errors for point in report.points)
    if errors:
        yield f"{errors} requests failed; figures are of those that were answered."
    if len(report.commits) > 1:
        yield f"The runs were made at {len(report.commits)} commits: {', '.join(report.commits)}."
    if any(commit.endswith("-dirty") for commit in report.commits):
        yield "Files of the source tree differed from its commit."
    if report.deployed:
        yield ("aiperf ran on the same machine as the servers and used its processor; that affects all variants alike.")
    if not report.request.ignore_eos:
        yield "Answers end where the model ends them; with fixed lengths (--ignore-eos) a text goes on past its end."
    yield (
        "Prompts come in the same order in every run, so prefix caches help from the second run on, all variants alike."
    )
    yield (
        "Acceptance at different concurrencies is over different numbers of the same prompts: compare variants, not "
        "rows."
    )
    if any(point.acceptance.acceptance_length is None for point in others):
        yield f"Where acceptance is “{UNKNOWN}”, the engine does not tell it, or nothing was drafted."


def _scatter(points: Sequence[Point]) -> Iterator[str]:
    spreads = [((point.highest - point.lowest) / point.throughput_per_device, point) for point in points]
    spread, point = max(spreads, key=lambda pair: pair[0], default=(0.0, None))
    if point is not None and spread > 0.1:
        where = f"“{point.variant}”, {point.concurrency} users"
        yield f"Rounds scatter by up to {spread:.0%} of their median ({where}): the machine was not quiet."
