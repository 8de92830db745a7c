"""Runs as they are kept, one JSON file each, and the medians over rounds that the report is made of."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from pydantic import ValidationError

from dflash_serve.client.acceptance_reading import AcceptanceReading, merged
from dflash_serve.common.frozen import Frozen
from dflash_serve.errors import UserError
from dflash_serve.proving.bench.pareto import Spot
from dflash_serve.proving.bench.plan import Cell


class Figures(Frozen):
    """What aiperf measured. Unknown is None."""

    requests: int
    """That were answered."""
    errors: int
    output_tokens: float
    seconds: float
    throughput: float
    """Output tokens/s of the server."""
    interactivity: float | None
    """Tokens/s that one user sees while an answer comes: the median of 1 / inter-token latency over requests."""
    first_token_ms: float | None
    """Median."""
    first_token_p99_ms: float | None
    inter_token_ms: float | None
    """Median."""


class Run(Figures):
    """One run: which, and what else is known of it."""

    way: str
    concurrency: int
    round: int
    acceptance: AcceptanceReading
    """From the engine's own metrics, over this run."""
    started: str
    """UTC."""
    commit: str | None
    """Of this program."""

    @property
    def cell(self) -> Cell:
        return Cell(self.way, self.concurrency, self.round)


class Point(Frozen):
    """A way at a concurrency: medians over rounds."""

    way: str
    concurrency: int
    rounds: int
    throughput_per_device: float
    lowest: float
    highest: float
    """Of the rounds, per device."""
    interactivity: float | None
    first_token_ms: float | None
    first_token_p99_ms: float | None
    inter_token_ms: float | None
    requests: int
    errors: int
    acceptance: AcceptanceReading
    """Over all rounds."""

    @property
    def spot(self) -> Spot | None:
        return None if self.interactivity is None else Spot(self.interactivity, self.throughput_per_device)


class RunFolder:
    """Finished runs on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, run: Run, slug: str) -> None:
        """Writes a run, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"{slug}-c{run.concurrency:03d}-r{run.round + 1}.json"
        write_whole(self.folder / name, run.model_dump_json(indent=1) + "\n")

    def runs(self) -> list[Run]:
        """All that are there.

        Raises:
            UserError: a file that is none of ours.
        """
        found = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                found.append(Run.model_validate_json(path.read_text(encoding="utf-8")))
            except (ValidationError, OSError, UnicodeDecodeError):
                raise UserError("not a run of this bench", where=str(path), do="remove it") from None
        return found


def write_whole(path: Path, text: str | bytes) -> None:
    """Writes under a temporary name, then renames."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(text.encode("utf-8") if isinstance(text, str) else text)
    os.replace(part, path)


def points(runs: Iterable[Run], devices: int, ways: Sequence[str]) -> list[Point]:
    """By way, in the order of `ways`, then by concurrency."""
    cells: dict[tuple[int, int], list[Run]] = {}
    for run in runs:
        if run.way in ways:
            cells.setdefault((ways.index(run.way), run.concurrency), []).append(run)
    return [_point(cells[key], devices) for key in sorted(cells)]


def _point(runs: Sequence[Run], devices: int) -> Point:
    rates = [run.throughput / devices for run in runs]
    return Point(
        way=runs[0].way,
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
        acceptance=merged([run.acceptance for run in runs]),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
