"""Runs as they are kept, one JSON file each, in a folder of one bench; and the medians over rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from pydantic import ValidationError

from dflash_serve.bench.aiperf import Figures, RequestSettings
from dflash_serve.bench.pareto import Spot
from dflash_serve.bench.settings import Cell, Variant
from dflash_serve.common.files import write_whole
from dflash_serve.common.frozen import Frozen
from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

IDENTITY, RUNS = "bench-of.json", "runs"
DO = "name another --output"


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
    """Of this program."""

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
    """Of the rounds, per device."""
    highest: float
    """Of the rounds, per device."""
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
        """Where it lies in the plot; None where its interactivity is unknown."""
        return None if self.interactivity is None else Spot(self.interactivity, self.throughput_per_device)

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


class RunFolder:
    """Finished runs on disk."""

    def __init__(self, output: Path) -> None:
        self.folder = output / RUNS

    def keep(self, run: Run, slug: str) -> None:
        """Writes a run.

        Raises:
            UserError: it cannot be written.
        """
        name = f"{slug}-c{run.concurrency:03d}-r{run.round + 1}.json"
        write_whole(self.folder / name, run.model_dump_json(indent=1) + "\n", do=DO)

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


class Identity(Frozen):
    """What runs must share to stand side by side; variants may be added."""

    request: RequestSettings
    backend: str | None
    variants: dict[str, str | Deployment]
    """By name: the URL of a server, or what is served."""


def claim_folder(folder: Path, request: RequestSettings, backend: str | None, variants: Sequence[Variant]) -> None:
    """Writes into the folder what its runs are of, or finds that it is the same as there.

    Raises:
        UserError: it holds another bench, or cannot be written.
    """
    found = {variant.name: variant.deployment or variant.url or "" for variant in variants}
    mine = Identity(request=request, backend=backend, variants=found)
    path = folder / IDENTITY
    try:
        if path.exists():
            mine = _joined(mine, Identity.model_validate_json(path.read_text(encoding="utf-8")), folder)
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(path), do=DO) from None
    except ValidationError:
        raise UserError("not of this bench", where=str(path), do=DO) from None
    write_whole(path, mine.model_dump_json(indent=1) + "\n", do=DO)


def _joined(mine: Identity, there: Identity, folder: Path) -> Identity:
    do = f"{DO}, or repeat the command that it was begun with"
    for field in ("request", "backend"):
        if getattr(mine, field) != getattr(there, field):
            raise UserError(f"it holds runs of another {field} ({_difference(mine, there)})", where=str(folder), do=do)
    for name, variant in mine.variants.items():
        if there.variants.get(name, variant) != variant:
            raise UserError(f"it holds runs of another “{name}”", where=str(folder), do=do)
    return mine.model_copy(update={"variants": {**there.variants, **mine.variants}})


def _difference(mine: Identity, there: Identity) -> str:
    """The first setting that differs."""
    if mine.backend != there.backend:
        return f"{there.backend}, not {mine.backend}"
    old, new = there.request.model_dump(), mine.request.model_dump()
    name = next(key for key in new if new[key] != old[key])
    return f"{name} {old[name]!r}, not {new[name]!r}"


def points_of(runs: Iterable[Run], devices: int, variants: Sequence[str]) -> list[Point]:
    """Medians over rounds, by variant in the order of `variants`, then by concurrency."""
    cells: dict[tuple[int, int], list[Run]] = {}
    for run in runs:
        if run.variant in variants:
            cells.setdefault((variants.index(run.variant), run.concurrency), []).append(run)
    return [_point(cells[key], devices) for key in sorted(cells)]


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
