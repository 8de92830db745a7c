"""An engine's constants fitted to what was measured: to published cells, or to a sweep of our own `bench`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from statistics import mean
from typing import Any

from dflash_serve.common.extras import import_extra
from dflash_serve.errors import UserError
from dflash_serve.planning.constants import Constants
from dflash_serve.planning.prediction import Predictor

PLAIN = ("plain_step", "plain_request")
ALL = (*PLAIN, "speculative_step", "speculative_request")
LEAST_ERROR, MOST_ERROR = 0.02, 0.9
DO = "give the bench.json of a `bench` of this pair"


@dataclass(frozen=True)
class MeasuredCell:
    """One measurement: so many requests at once, at one width, and the tokens/s that they saw together."""

    label: str
    predictor: Predictor
    """Its constants do not matter."""
    batch: int
    width: int
    tokens: float
    """Gained a request and step."""
    rate: float
    """Tokens/s of one server."""

    def predicted(self, constants: Constants) -> float:
        """Tokens/s with these constants."""
        predictor = replace(self.predictor, constants=constants)
        return self.batch * predictor.point("", self.batch, self.width, self.tokens).interactivity

    def error(self, constants: Constants) -> float:
        """Relative; positive = predicted too fast."""
        return self.predicted(constants) / self.rate - 1


def fit(cells: Sequence[MeasuredCell], start: Constants, free: Sequence[str] = ALL) -> Constants:
    """The constants, none negative, with the least relative errors; outliers beyond 10 % count less (soft L1).

    Args:
        start: where the search begins; what is not in `free` stays as it is there.
    """
    optimize = import_extra("plan", "scipy.optimize")

    def set_to(values: Sequence[float]) -> Constants:
        return start.model_copy(update={name: float(value) for name, value in zip(free, values, strict=True)})

    def residuals(values: Sequence[float]) -> list[float]:
        constants = set_to(values)
        return [log(cell.predicted(constants) / cell.rate) for cell in cells]

    first = [max(1e-3, getattr(start, name)) for name in free]
    found = optimize.least_squares(residuals, first, bounds=(0, float("inf")), loss="soft_l1", f_scale=0.1)
    return set_to([round(float(value), 4) for value in found.x])


@dataclass(frozen=True)
class Calibration:
    """Constants from a bench, and how far each of its points is off with them."""

    constants: Constants
    cells: tuple[MeasuredCell, ...]
    skipped: tuple[str, ...]
    """Points that were not used, and why."""

    def lines(self) -> list[str]:
        """For people: every point."""
        told = [
            f"{cell.label}: measured {cell.rate:,.0f} tokens/s, predicted {cell.predicted(self.constants):,.0f} "
            f"({cell.error(self.constants):+.0%})"
            for cell in self.cells
        ]
        return [*told, *(f"not used: {each}" for each in self.skipped)]


def calibrate(path: Path, predictor: Predictor, target: str, copies: int = 1) -> Calibration:
    """Fits the constants of `predictor`, of the split that was measured, to a bench's report.

    Args:
        target: what the plan is for.
        copies: of the model, that shared the users of the measured server.

    Raises:
        UserError: no report of a bench, of another target, or with too few points.
    """
    report = _report(path)
    measured = report.get("served", {}).get("Target")
    if measured is not None and measured != target:
        raise UserError(f"it measured {measured}, the plan is for {target}", where=f"--calibrate {path}", do=DO)
    cells, skipped = _cells(report, predictor, copies)
    free = [name for name in ALL if any((cell.width > 1) == name.startswith("speculative") for cell in cells)]
    counts = {kind: sum((cell.width > 1) == kind for cell in cells) for kind in (False, True)}
    if counts[False] < 2 or counts[True] == 1:
        what = f"{counts[False]} usable points without speculation and {counts[True]} with: two of a kind are needed"
        raise UserError(what, where=f"--calibrate {path}", do="bench --variants off,fixed at several --concurrency")
    found = fit(cells, predictor.constants, free)
    plain = _mean_error([cell for cell in cells if cell.width == 1], found)
    wide = _mean_error([cell for cell in cells if cell.width > 1], found) if counts[True] else predictor.constants.error
    hardware = report.get("environment", {}).get("hardware") or "unknown hardware"
    update = {
        "name": f"calibrated-{path.stem}",
        "evidence": "calibrated",
        "source": f"{len(cells)} points of {path.name}, on {hardware}",
        "plain_error": plain,
        "error": wide,
    }
    return Calibration(found.model_copy(update=update), tuple(cells), tuple(skipped))


def _mean_error(cells: Sequence[MeasuredCell], constants: Constants) -> float:
    return min(MOST_ERROR, max(LEAST_ERROR, round(mean(abs(cell.error(constants)) for cell in cells), 3)))


def _report(path: Path) -> Mapping[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"cannot be read ({error})", where=f"--calibrate {path}", do=DO) from None
    if not isinstance(report, dict) or not isinstance(report.get("points"), list):
        raise UserError("no report of `bench`", where=f"--calibrate {path}", do=DO)
    return report


def _cells(report: Mapping[str, Any], predictor: Predictor, copies: int) -> tuple[list[MeasuredCell], list[str]]:
    """Points at a fixed width; those of `auto` mix widths and tell no step's time."""
    cells, skipped = [], []
    for point in report["points"]:
        try:
            variant, users = str(point["variant"]), int(point["concurrency"])
            seen = point["interactivity"]
            length = point["acceptance"]["acceptance_length"]
        except (KeyError, TypeError, ValueError):
            skipped.append("a point that is none of a bench")
            continue
        label = f"{variant}, {users} users"
        word = variant.removeprefix("fixed ")
        width = 1 if variant == "off" else int(word) if word.isdecimal() else None
        tokens = 1.0 if width == 1 else length
        if width is None or seen is None or tokens is None:
            why = "its width changes" if width is None else "its speed or acceptance is unknown"
            skipped.append(f"{label} ({why})")
            continue
        batch = max(1, round(users / copies))
        cells.append(MeasuredCell(label, predictor, batch, width, float(tokens), batch * float(seen)))
    return cells, skipped
