"""How much of a block will be accepted: from a report, an acceptance length, or a published task; else a band."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from dflash_serve.errors import UserError, did_you_mean
from dflash_serve.speculation.statistics import AcceptanceStatistics

PRESETS = "published_acceptance.json"
BAND = (3.0, 4.5, 6.0)
"""Acceptance lengths of a whole block that published drafters have, from chat to mathematics."""
AS_IT_IS = "as it is"
"""What `evaluate`'s reports call a drafter with its own features."""


@dataclass(frozen=True)
class ExpectedAcceptance:
    """Survival of slots 1..B-1, and where it comes from."""

    name: str
    survival: tuple[float, ...]
    source: str

    def length(self, width: int) -> float:
        """Tokens gained a step at that width, the bonus token counted."""
        return 1 + sum(self.survival[: width - 1])


def from_length(length: float, block_size: int, source: str, *, measured_at: int | None = None) -> ExpectedAcceptance:
    """Geometric survival p, p^2, ... with 1 + p + ... + p^(M-1) = length, M the block it was measured with.

    Checked on published pairs of widths (16 -> 8; 10 -> 6, 4): within -5 to +3 % in 13 of 13.

    Raises:
        UserError: it is not between 1 and M.
    """
    most = measured_at or block_size
    if not 1 < length < most:
        do = f"tokens gained a step, the bonus token counted: more than 1, less than {most}"
        raise UserError(f"{length:g} is no acceptance length of a block of {most}", where="--acceptance-length", do=do)
    share = _ratio_of(length, most)
    survival = tuple(share**slot for slot in range(1, block_size))
    return ExpectedAcceptance(f"\N{GREEK SMALL LETTER TAU} {1 + sum(survival):.2f}", survival, source)


def _ratio_of(length: float, slots: int) -> float:
    """p of 1 + p + ... + p^(slots-1) = length, by bisection: it rises with p."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**slot for slot in range(slots)) < length else (low, middle)
    return low


def band(block_size: int) -> list[ExpectedAcceptance]:
    """What drafters that nobody measured may do."""
    source = "nothing is known of this drafter's acceptance: a band, not a prediction"
    return [from_length(min(length, 0.9 * block_size), block_size, source) for length in BAND]


@cache
def presets() -> dict[str, Any]:
    """Published acceptance lengths: target -> {block_size, source, tasks}."""
    found: dict[str, Any] = json.loads((files(__package__) / PRESETS).read_text(encoding="utf-8"))
    return found


def of_task(task: str, target: str, block_size: int) -> ExpectedAcceptance:
    """A published acceptance length of this target's own drafter.

    Raises:
        UserError: none was published; says which were.
    """
    name = target.rstrip("/").rpartition("/")[2].lower()
    rows = {key: row for key, row in presets().items() if name.startswith(key.lower())}
    if not rows:
        have, do = ", ".join(presets()), "give --acceptance-length, or --survival a report of `evaluate`"
        raise UserError(f"no acceptance was published for {target} (there is: {have})", where=f"--task {task}", do=do)
    key = max(rows, key=len)
    row = rows[key]
    if task not in row["tasks"]:
        do = did_you_mean(task, row["tasks"]) or f"there are: {', '.join(row['tasks'])}"
        raise UserError(f"no acceptance was published for this task of {key}", where=f"--task {task}", do=do)
    source = f"published for {key}, {task}, block size {row['block_size']}, greedy ({row['source']})"
    return from_length(row["tasks"][task], block_size, source, measured_at=row["block_size"])


def from_report(path: Path, task: str | None, block_size: int) -> ExpectedAcceptance:
    """Survival measured by `evaluate --output` or by `bench`.

    Raises:
        UserError: it is no such report, has no such task, or tells no survival.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"cannot be read ({error})", where=f"--survival {path}") from None
    if isinstance(report, dict) and isinstance(report.get("tasks"), dict):
        survival, what = _of_evaluation(report["tasks"], task, path)
    elif isinstance(report, dict) and isinstance(report.get("points"), list):
        survival, what = _of_bench(report["points"]), "bench"
    else:
        raise UserError(
            "no report", where=f"--survival {path}", do="give the JSON of `evaluate --output` or of `bench`"
        )
    known = [float(share) for share in survival[: block_size - 1] if share is not None]
    if not known:
        raise UserError("it tells no survival", where=f"--survival {path}", do="measure with a fixed width")
    conditional = known[-1] / known[-2] if len(known) > 1 and known[-2] else known[-1]
    while len(known) < block_size - 1:  # slots that were not measured survive as the last one did
        known.append(known[-1] * conditional)
    source = f"measured: {what} of {path.name}"
    return ExpectedAcceptance(f"\N{GREEK SMALL LETTER TAU} {1 + sum(known):.2f}", tuple(known), source)


def _of_evaluation(tasks: Mapping[str, Any], task: str | None, path: Path) -> tuple[Sequence[float | None], str]:
    name = task or (next(iter(tasks)) if len(tasks) == 1 else None)
    if name is None or name not in tasks:
        do = f"give --task one of: {', '.join(tasks)}"
        raise UserError("which task?" if task is None else f"no task {task!r}", where=f"--survival {path}", do=do)
    try:
        return list(tasks[name][AS_IT_IS]["survival"]), name
    except (KeyError, TypeError):
        raise UserError("no report of `evaluate`", where=f"--survival {path}") from None


def _of_bench(points: Sequence[Any]) -> list[float | None]:
    """Of the point that verified most slots, and of those the one that did so most often."""
    counted = []
    for point in points:
        try:
            raw = {
                key: value for key, value in point["acceptance"].items() if key not in ("acceptance_length", "survival")
            }
            statistics = AcceptanceStatistics.from_dict(raw)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
        known = [share for share in statistics.survival() if share is not None]
        counted.append(
            (str(point.get("variant", "")).startswith("fixed"), len(known), statistics.verifications or 0, known)
        )
    return list(max(counted, key=lambda each: each[:3])[3]) if counted else []
