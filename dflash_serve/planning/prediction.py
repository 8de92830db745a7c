"""Tokens/s from step times: one split of one pair under one load, at any batch and width.

    tokens/s/user = tau(w) / (step + prefill share);    tokens/s/GPU = batch x that / GPUs of the copy

Prefill share: while a batch decodes, lam = batch x tau / OSL prompts arrive a step, in Poisson batches: a step is
interrupted with probability 1 - e^-lam, for a prefill of lam / (1 - e^-lam) prompts and the engine's own step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any

from dflash_serve.common.extras import import_extra
from dflash_serve.errors import UserError, did_you_mean
from dflash_serve.planning.step_times import Constants, Milliseconds, Split, StepTimes
from dflash_serve.speculation.allocation import choose_widths
from dflash_serve.speculation.costs import CostModel
from dflash_serve.speculation.statistics import AcceptanceStatistics

PRESETS = "published_acceptance.json"
BAND = (3.0, 4.5, 6.0)
"""Acceptance lengths of a whole block that published drafters have, from chat to mathematics."""
AS_IT_IS = "as it is"
"""Name of a drafter with its own features in reports of `evaluate`."""


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
    # p of 1 + p + ... + p^(slots-1) = length, by bisection: the sum rises with p.
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**slot for slot in range(slots)) < length else (low, middle)
    return low


def band(block_size: int) -> list[ExpectedAcceptance]:
    """A low, middle and high acceptance, for a drafter that has not been measured."""
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
    # From the point that verified most slots; among these, from the one with most verifications.
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


WHOLE = Split()
"""A copy on one GPU."""
MANY = 4
"""Prompts of the larger prefill; between one and so many it is taken as linear, and beyond."""
LEAST = 1e-6


@dataclass(frozen=True)
class Load:
    """Mean lengths of requests, in tokens."""

    isl: int
    """Prompt."""
    osl: int
    """Answer."""

    @property
    def context(self) -> int:
        """Tokens before a step, on average."""
        return self.isl + self.osl // 2


@dataclass(frozen=True)
class OperatingPoint:
    """A variant at one split, batch and width, with its predicted figures."""

    variant: str
    """`off`, `fixed B` or `auto`."""
    split: Split
    batch: int
    width: int
    acceptance_length: float
    step: Milliseconds
    """A whole step, its share of prefills included."""
    interactivity: float
    """Tokens/s that one user sees."""
    throughput: float
    """Tokens/s/GPU."""
    first_token_ms: float
    """From arrival to first token, with a place free in the batch: half a step's wait and the prefill."""


@dataclass(frozen=True)
class Predictor:
    """Predicts operating points of one split."""

    times: StepTimes
    constants: Constants
    load: Load
    block_size: int
    split: Split = WHOLE

    def step(self, batch: int, width: int) -> Milliseconds:
        """A step without prefills; width 1 = without speculation."""
        own, scale = self.constants.of_step(batch, speculates=width > 1), self.constants.scale
        return (self._verified(batch, width) + self._drafted(batch, width)).times(scale) + own

    def _verified(self, batch: int, width: int) -> Milliseconds:
        return self.times.verify(batch, width, self.load.context)

    def _drafted(self, batch: int, width: int) -> Milliseconds:
        return self.times.draft(batch, self.block_size, self.load.context) if width > 1 else Milliseconds()

    @cached_property
    def _prefills(self) -> tuple[Milliseconds, Milliseconds]:
        return self.times.prefill(1, self.load.isl), self.times.prefill(MANY, self.load.isl)

    def prefill(self, prompts: float) -> Milliseconds:
        """One pass over so many prompts; the engine's own time is in it."""
        one, many = self._prefills
        more = (many + one.times(-1)).times((prompts - 1) / (MANY - 1))
        return (one + more).times(self.constants.scale) + self.constants.of_step(0, speculates=False)

    def prefill_share(self, arriving: float) -> Milliseconds:
        """Mean prefill time in a step, for `arriving` prompts a step."""
        interrupted = 1 - exp(-arriving)
        return self.prefill(arriving / interrupted).times(interrupted)

    def point(
        self, variant: str, batch: int, width: int, tokens: float, step: Milliseconds | None = None
    ) -> OperatingPoint:
        """The operating point of a batch whose requests each gain `tokens` a step."""
        step = step or self.step(batch, width)
        whole = step + self.prefill_share(batch * tokens / self.load.osl)
        user = 1e3 * tokens / whole.total
        first = step.total / 2 + self.prefill(1).total
        return OperatingPoint(
            variant, self.split, batch, width, tokens, whole, user, user * batch / self.split.tensor, first
        )

    def curve(
        self, variant: str, batches: Sequence[int], width: int, acceptance: ExpectedAcceptance
    ) -> list[OperatingPoint]:
        """One width at every batch. A larger batch that is cheaper is noise: the smaller costs no more."""
        steps = [self.step(batch, width) for batch in batches]
        for place in range(len(steps) - 2, -1, -1):
            steps[place] = min(steps[place], steps[place + 1], key=lambda each: each.total)
        tokens = acceptance.length(width)
        return [self.point(variant, b, width, tokens, step) for b, step in zip(batches, steps, strict=True)]

    def auto(self, batch: int, widths: Sequence[int], acceptance: ExpectedAcceptance) -> int:
        """The width that the width policy chooses for such a batch at these costs."""
        survival = acceptance.survival[: self.block_size - 1]
        wide = [width for width in widths if width > 1]
        return choose_widths([survival] * batch, self._cost_of_batch(batch, wide), allowed_widths=wide)[0]

    def _cost_of_batch(self, batch: int, widths: Sequence[int]) -> CostModel:
        # Seconds of this batch alone, context included.
        scale = self.constants.scale
        plain, own = (self.constants.of_step(batch, speculates=each).total for each in (False, True))
        target = {batch * width: (scale * self._verified(batch, width).total + plain) / 1e3 for width in (1, *widths)}
        draft = scale * self._drafted(batch, max(widths)).total + own - plain
        return CostModel(target=target, draft={batch: max(LEAST, draft / 1e3)})

    def cost_model(self, batch: int, widths: Sequence[int]) -> CostModel:
        """Cost table for `width: auto` on a server of at most `batch` requests, used before it has measured.

        A table over rows cannot hold the engine's milliseconds a request; those of a full batch are taken.
        """
        scale, context = self.constants.scale, self.load.context
        plain, own = (self.constants.of_step(batch, speculates=each).total for each in (False, True))
        rows = sorted({count * width for count in _doubled(batch) for width in (1, *widths)})
        requests = _doubled(batch)
        verify, draft, block = self.times.verify, self.times.draft, self.block_size
        further = verify(batch, 1, 2 * context).total - verify(batch, 1, context).total
        drafted = draft(batch, block, 2 * context).total - draft(batch, block, context).total
        return CostModel(
            target={r: round((scale * verify(1, r, 1).total + plain) / 1e3, 7) for r in rows},
            draft={b: round(max(LEAST, (scale * draft(b, block, 1).total + own - plain) / 1e3), 7) for b in requests},
            target_context=max(0.0, scale * further / (batch * context) / 1e3),
            draft_context=max(0.0, scale * drafted / (batch * context) / 1e3),
        )


def _doubled(most: int) -> list[int]:
    return sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})


PLAIN = ("plain_step", "plain_request")
ALL = (*PLAIN, "speculative_step", "speculative_request")
LEAST_ERROR, MOST_ERROR = 0.02, 0.9
DO = "give the bench.json of a `bench` of this pair"


@dataclass(frozen=True)
class MeasuredCell:
    """One measurement: so many requests at once, at one width, and the tokens/s that they saw together."""

    label: str
    predictor: Predictor
    """Its constants are not used."""
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
    # Points at a fixed width only: a point of `auto` mixes widths, so it does not give a step's time.
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
