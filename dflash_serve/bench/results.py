"""Finished runs of a bench on disk, and the medians over rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median

from pydantic import ValidationError

from dflash_serve.bench.aiperf import Figures, RequestSettings
from dflash_serve.bench.pareto import Spot
from dflash_serve.bench.settings import Cell, Variant, slug
from dflash_serve.common.files import require_writable
from dflash_serve.common.settings import Frozen
from dflash_serve.common.store import Store
from dflash_serve.errors import UserError
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

RUNS = "runs"


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
    def spot(self) -> Spot | None:
        """Its point in the plot; None if its interactivity is unknown."""
        if self.interactivity is None:
            return None
        return Spot(self.interactivity, self.throughput_per_device, self.concurrency)

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


class Identity(Frozen):
    """Settings that runs must share to stand side by side."""

    request: RequestSettings
    backend: str | None
    variant: Variant


class Runs:
    """Finished runs of a bench on disk, in one store for each variant.

    Args:
        output: the bench's folder.
        request: settings of every request.

    Attributes:
        changed: by variant, the settings in which its kept runs differ from this bench, which measures it anew.

    Raises:
        UserError: the folder cannot be written, or holds a file that is not a store.
    """

    def __init__(
        self, output: Path, request: RequestSettings, backend: str | None, variants: Mapping[str, Variant]
    ) -> None:
        require_writable(output / RUNS)
        self._stores = {
            name: Store(
                output / RUNS / f"{slug(name)}.jsonl",
                Identity(request=request, backend=backend, variant=variant).model_dump(mode="json"),
            )
            for name, variant in variants.items()
        }
        self.changed = {name: store.changed for name, store in self._stores.items() if store.changed}

    def keep(self, run: Run) -> None:
        """Writes a run."""
        self._stores[run.variant].put(f"c{run.concurrency}-r{run.round + 1}", run.model_dump(mode="json"))

    def all(self) -> list[Run]:
        """All finished runs with this bench's settings.

        Raises:
            UserError: a run of another version.
        """
        found = []
        for store in self._stores.values():
            try:
                found += [Run.model_validate(value) for value in store.values.values()]
            except ValidationError:
                raise UserError("not runs of this version", where=str(store.path), do="remove it") from None
        return found
