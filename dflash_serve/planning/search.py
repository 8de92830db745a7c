"""Prices every split, batch and width that a question leaves open, and finds the best."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dflash_serve.errors import UserError
from dflash_serve.planning.prediction import ExpectedAcceptance, OperatingPoint, Predictor
from dflash_serve.planning.question import Objective, PlanQuestion, step_times_of
from dflash_serve.planning.step_times import Split

OFF, AUTO = "off", "auto"
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
WIDTHS = (2, 3, 4, 5, 6, 8, 10, 12, 14, 16)


def fixed(block_size: int) -> str:
    """The variant that verifies the whole block in every step."""
    return f"fixed {block_size}"


@dataclass
class Exploration:
    """All operating points that were priced."""

    question: PlanQuestion
    can_follow: bool
    """True where the engine can run `width: auto`."""
    predictors: dict[Split, Predictor] = field(default_factory=dict)
    room: dict[Split, int] = field(default_factory=dict)
    """Requests whose K/V fits, by split."""
    notes: list[str] = field(default_factory=list)
    curves: list[dict[str, list[OperatingPoint]]] = field(default_factory=list)
    """For each acceptance: variant -> points, split after split, by rising batch."""

    @property
    def widths(self) -> list[int]:
        """Widths among which `auto` chooses."""
        block = self.question.block_size
        return sorted({*(width for width in WIDTHS if width < block), block})

    @property
    def basis(self) -> str:
        return "; ".join(dict.fromkeys(each.times.basis for each in self.predictors.values()))


def explore(question: PlanQuestion, *, can_follow: bool = True) -> Exploration:
    """Prices every split, batch and width.

    Raises:
        UserError: not one request fits.
    """
    found = Exploration(question, can_follow)
    for split in question.splits():
        times, why = step_times_of(question, split)
        if why and why not in found.notes:
            found.notes.append(why)
        room = times.kv_tokens() // (question.load.isl + question.load.osl)
        if room < 1:
            found.notes.append(f"{split}: weights leave no room for one request's K/V")
            continue
        found.predictors[split] = Predictor(times, question.constants, question.load, question.block_size, split)
        found.room[split] = room
    if not found.predictors:
        what = f"{question.pair.layout.shape.name} does not fit {question.count} x {question.on.gpu.name}"
        raise UserError(what, where="--count", do="give more GPUs, a larger kind, or a quantised target")
    found.curves = [_curves(found, acceptance) for acceptance in question.acceptances]
    return found


def batches_of(found: Exploration, split: Split) -> list[int]:
    """Batches that fit, the largest that does among them."""
    deployment = found.question.deployment
    asked = (deployment.limits.max_batch_size or 0) // deployment.parallel.data  # a server's, shared by its copies
    most = min(found.room[split], asked or BATCHES[-1], BATCHES[-1])
    return sorted({*(batch for batch in BATCHES if batch < most), most})


def _curves(found: Exploration, acceptance: ExpectedAcceptance) -> dict[str, list[OperatingPoint]]:
    block = found.question.block_size
    curves: dict[str, list[OperatingPoint]] = {OFF: [], fixed(block): []}
    if found.can_follow:
        curves[AUTO] = []
    for split, predictor in found.predictors.items():
        batches = batches_of(found, split)
        curves[OFF] += predictor.curve(OFF, batches, 1, acceptance)
        curves[fixed(block)] += predictor.curve(fixed(block), batches, block, acceptance)
        if found.can_follow:
            curves[AUTO] += _auto(found, predictor, batches, acceptance)
    return curves


def _auto(
    found: Exploration, predictor: Predictor, batches: Sequence[int], acceptance: ExpectedAcceptance
) -> list[OperatingPoint]:
    # At each batch, the width that the policy chooses.
    chosen = [predictor.auto(batch, found.widths, acceptance) for batch in batches]
    by_width = {w: predictor.curve(AUTO, batches, w, acceptance) for w in sorted(set(chosen))}
    return [by_width[width][place] for place, width in enumerate(chosen)]


def meets(point: OperatingPoint, objective: Objective) -> bool:
    """True where every limit holds."""
    slow = objective.interactivity is not None and point.interactivity < objective.interactivity
    late = objective.first_token_ms is not None and point.first_token_ms > objective.first_token_ms
    return not (slow or late)


def best(points: Iterable[OperatingPoint], objective: Objective) -> OperatingPoint | None:
    """The most tokens/s/GPU of those that meet it; among equals, the more interactive. None = none does."""
    fit = [point for point in points if meets(point, objective)]
    return max(fit, key=lambda point: (point.throughput, point.interactivity), default=None)


def fastest(points: Iterable[OperatingPoint]) -> OperatingPoint:
    """The most tokens/s/user."""
    return max(points, key=lambda point: point.interactivity)


def front(points: Iterable[OperatingPoint]) -> list[OperatingPoint]:
    """Those that no other beats in both, by falling interactivity."""
    kept: list[OperatingPoint] = []
    for point in sorted(points, key=lambda each: (-each.interactivity, -each.throughput)):
        if not kept or point.throughput > kept[-1].throughput:
            kept.append(point)
    return kept


def stops_paying(points: Sequence[OperatingPoint], plain: Sequence[OperatingPoint], split: Split) -> int | None:
    """The smallest batch of a split from which on speculation is slower than plain decoding; None = it never is."""
    own = {point.batch: point.throughput for point in points if point.split == split}
    base = {point.batch: point.throughput for point in plain if point.split == split}
    losing = None
    for batch in sorted(own, reverse=True):
        if own[batch] >= base[batch]:
            break
        losing = batch
    return losing


def require_met(found: Exploration, objective: Objective) -> None:
    """Refuses limits that no point meets, and names the nearest limit that is met.

    Raises:
        UserError: no point meets them.
    """
    points = [point for curves in found.curves for each in curves.values() for point in each]
    if any(meets(point, objective) for point in points):
        return
    user, late = objective.interactivity, objective.first_token_ms
    if late is not None and not any(point.first_token_ms <= late for point in points):
        near = min(points, key=lambda point: point.first_token_ms)
        what, limit = (
            f"no way of running has its first token after {late:g} ms",
            f"--slo-ttft {near.first_token_ms:.0f}",
        )
    else:
        near = fastest(point for point in points if meets(point, Objective(None, late)))
        what, limit = f"no way of running gives {user:g} tokens/s/user", f"--slo-interactivity {near.interactivity:.0f}"
        limit = limit.replace(f"{near.interactivity:.0f}", f"{int(near.interactivity)}")
    how = f"{near.variant}, {near.split}, batch {near.batch}"
    raise UserError(
        what, where="the SLO", do=f"the nearest that is met is {limit} ({how}); or more GPUs, or another GPU"
    )
