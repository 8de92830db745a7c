"""Everything a finished (or interrupted) sweep says, in one value, and the files that say it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_serve.client.acceptance_reading import AcceptanceReading
from dflash_serve.common.provenance import Environment
from dflash_serve.proving.bench.plan import Sweep, Workload
from dflash_serve.proving.bench.results import Point, write_whole
from dflash_serve.proving.bench.sentence import Comparison, at_every_spot, curves

JSON, CSV, HTML, PARETO = "bench.json", "bench.csv", "report.html", "pareto.png"


@dataclass(frozen=True)
class Report:
    """What there is to say."""

    title: str
    sentence: str
    comparison: Comparison | None
    baseline: str
    points: Sequence[Point]
    served: Sequence[tuple[str, str]]
    """What was served: (term, words)."""
    workload: Workload
    sweep: Sweep
    environment: Environment
    commits: Sequence[str]
    """Of the runs; more than one where the sweep was continued with another."""
    dates: Sequence[str]
    """Days of the runs, UTC."""
    order: str
    """In which order the runs were made."""
    warm_up: bool
    """Each server answered a warm-up run before it was measured."""
    device: str
    """What throughput is divided by, as a word."""
    devices: int
    done: int
    planned: int
    local: bool
    """The load generator shared the machine with the servers."""

    @property
    def ways(self) -> list[str]:
        """In their order."""
        return list(dict.fromkeys(point.way for point in self.points))

    @property
    def ratios(self) -> list[list[Comparison]]:
        """The other ways at every interactivity of the baseline's frontier."""
        return at_every_spot(curves(self.points), self.baseline)


def write_report(report: Report, folder: Path) -> list[Path]:
    """Writes JSON, CSV, PNG and HTML, each whole or not at all."""
    from dflash_serve.proving.bench.html import page
    from dflash_serve.proving.bench.plots import pareto

    plot = pareto(report)
    contents: dict[str, str | bytes] = {
        JSON: json.dumps(as_json(report), indent=1, ensure_ascii=False) + "\n",
        CSV: as_csv(report),
        PARETO: plot.png,
        HTML: page(report, plot.svg),
    }
    for name, content in contents.items():
        write_whole(folder / name, content)
    return [folder / name for name in contents]


def as_json(report: Report) -> dict[str, Any]:
    """All figures, for programs."""
    return {
        "sentence": report.sentence,
        "comparison": report.comparison and {**asdict(report.comparison), "ratio": report.comparison.ratio},
        "ratios": [[{**asdict(each), "ratio": each.ratio} for each in row] for row in report.ratios],
        "served": dict(report.served),
        "workload": report.workload.model_dump(),
        "sweep": report.sweep.model_dump(),
        "order": report.order,
        "environment": report.environment.model_dump(),
        "commits": list(report.commits),
        "dates": list(report.dates),
        "devices": report.devices,
        "runs": {"done": report.done, "planned": report.planned},
        "points": [point.model_dump(mode="json") for point in report.points],
    }


def as_csv(report: Report) -> str:
    """A line for each way and concurrency; an unknown figure is an empty field."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(_line(report.points[0])) if report.points else ["way"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(_line(point) for point in report.points)
    return out.getvalue()


def _line(point: Point) -> dict[str, Any]:
    acceptance = point.acceptance
    return {
        "way": point.way,
        "concurrency": point.concurrency,
        "rounds": point.rounds,
        "tokens_per_s_per_device": round(point.throughput_per_device, 3),
        "lowest": round(point.lowest, 3),
        "highest": round(point.highest, 3),
        "tokens_per_s_per_user": _rounded(point.interactivity),
        "first_token_ms_p50": _rounded(point.first_token_ms),
        "first_token_ms_p99": _rounded(point.first_token_p99_ms),
        "inter_token_ms_p50": _rounded(point.inter_token_ms),
        "acceptance_length": _rounded(acceptance.acceptance_length, 4),
        "survival": " ".join(f"{value:.4f}" for value in acceptance.survival or ()),
        "mean_width": _rounded(mean_width(acceptance)),
        "requests": point.requests,
        "errors": point.errors,
    }


def mean_width(acceptance: AcceptanceReading) -> float | None:
    """Slots verified a step, the anchor counted, steps without speculation included; None where it is not told."""
    steps = sum((acceptance.widths or {}).values())
    return sum(width * count for width, count in (acceptance.widths or {}).items()) / steps if steps else None


def caveats(report: Report) -> Iterator[str]:
    """What a careful reader has to know, from what happened."""
    if report.done < report.planned:
        yield f"Incomplete: {report.done} of {report.planned} runs are done. The same command goes on with the rest."
    if report.sweep.rounds == 1:
        yield "One round: nothing is known of how much the figures scatter."
    yield from _scatter(report.points)
    errors = sum(point.errors for point in report.points)
    if errors:
        yield f"{errors} requests failed; figures are of those that were answered."
    if len(report.commits) > 1:
        yield f"The runs were made at {len(report.commits)} commits: {', '.join(report.commits)}."
    if any(commit.endswith("-dirty") for commit in report.commits):
        yield "Files of the source tree differed from its commit."
    if report.local:
        yield "aiperf ran on the same machine as the servers, and took its share of the processor, from all ways alike."
    if not report.workload.ignore_eos:
        yield "Answers end where the model ends them; with fixed lengths (--ignore-eos) a text goes on past its end."
    yield "Prompts come in the same order in every run, so prefix caches help from the second run on, all ways alike."
    yield "Acceptance at different concurrencies is over different numbers of the same prompts: compare ways, not rows."
    if any(point.acceptance.acceptance_length is None for point in report.points if point.way != report.baseline):
        yield "Where acceptance is “\N{EN DASH}”, the engine does not tell it, or nothing was drafted."


def _scatter(points: Iterable[Point]) -> Iterator[str]:
    spreads = [((point.highest - point.lowest) / point.throughput_per_device, point) for point in points]
    spread, point = max(spreads, key=lambda pair: pair[0], default=(0.0, None))
    if point is not None and spread > 0.1:
        where = f"“{point.way}”, {point.concurrency} users"
        yield f"Rounds scatter by up to {spread:.0%} of their median ({where}): the machine was not quiet."


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)
