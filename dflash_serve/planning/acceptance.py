"""Expected acceptance of a plan: given, measured, published for the drafter, or a band where nothing is known of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from typing import Any

from dflash_serve.checkpoint.catalogue import CataloguedDrafter, PublishedAcceptance, catalogue, drafters_of
from dflash_serve.common.documents import read_json
from dflash_serve.doctor.lengths import FEWEST_STEPS
from dflash_serve.errors import UserError, did_you_mean
from dflash_serve.planning.prediction import ExpectedAcceptance

TASKS = {
    **{"gsm8k": "GSM8K", "math500": "MATH-500", "aime25": "AIME25", "humaneval": "HumanEval", "mbpp": "MBPP"},
    **{"lcb": "LiveCodeBench", "mt-bench": "MT-Bench", "alpaca": "Alpaca"},
}
"""Name of a task on the command line -> its name in the catalogue; other tasks have their own name in lower case."""
BAND = (3.0, 4.5, 6.0)  # Acceptance lengths of a whole block that published drafters have, from chat to mathematics
RISE = 0.05  # Rise of survival from slot to slot that few steps explain
AS_IT_IS = "as it is"  # Name of a drafter with its own features in reports of `evaluate`


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
    low, high = 0.0, 1.0
    for _ in range(60):  # bisection: the sum rises with p
        share = (low + high) / 2
        low, high = (share, high) if sum(share**slot for slot in range(most)) < length else (low, share)
    return _expected([low**slot for slot in range(1, block_size)], source)


def band(block_size: int, published: str = "") -> list[ExpectedAcceptance]:
    """A low, middle and high acceptance, where none was asked for.

    Args:
        published: what was published for the drafter, by task.
    """
    source = "nothing is known of this drafter's acceptance: a band, not a prediction"
    if published:
        source = f"no --task was given: a band, not a prediction; published for this drafter are {published}"
    return [from_length(min(length, 0.9 * block_size), block_size, source) for length in BAND]


def of_task(task: str, target: str, drafter: str | None, block_size: int) -> ExpectedAcceptance:
    """The acceptance length that was published for a drafter of the catalogue at a task, beside its own target.

    Args:
        drafter: whole name; None = none was named, and the first drafter of the target with a figure is taken.

    Raises:
        UserError: none was published; says which were.
    """
    task, ours = task.lower(), catalogued_with(target)
    found = _published_at(task, [row for row in ours if drafter is None or _is(row, drafter)])
    if found is None:
        raise _unpublished(task, target, drafter, ours)
    row, figure = found
    source = f"published for {row.repository} with {row.target} at {figure.benchmark}: {figure.setting}"
    if row.block_size not in (None, block_size):
        source = f"from the \N{GREEK SMALL LETTER TAU} {figure.value:g} that was {source}"
    source += f" ({figure.source})" + ("; the drafter of this plan is another, assumed one" if drafter is None else "")
    return from_length(figure.value, block_size, source, measured_at=row.block_size)


def named_target(target: str) -> str:
    """The name by which tables know a target: a folder goes by its own name."""
    return Path(target).name if Path(target).is_dir() else target


def catalogued_with(target: str) -> list[CataloguedDrafter]:
    """Rows of a target, by its whole name only: a fine-tune whose name begins alike has another acceptance."""
    return drafters_of(named_target(target))


def _is(row: CataloguedDrafter, drafter: str) -> bool:
    return row.repository.lower() == drafter.lower()


def task_of(figure: PublishedAcceptance) -> str:
    """The name on the command line of a figure's benchmark."""
    named = {benchmark: task for task, benchmark in TASKS.items()}
    return named.get(figure.benchmark, figure.benchmark.lower())


def _published_at(task: str, rows: Iterable[CataloguedDrafter]) -> tuple[CataloguedDrafter, PublishedAcceptance] | None:
    figures = ((row, figure) for row in rows for figure in row.acceptance_length if task_of(figure) == task)
    return next(figures, None)


def _unpublished(task: str, target: str, drafter: str | None, ours: Sequence[CataloguedDrafter]) -> UserError:
    rows = [row for row in ours if drafter is None or _is(row, drafter)]
    whose = f"a drafter of {target}" if drafter is None else f"{drafter} with {target}"
    what, do = (
        f"no acceptance was published for {whose}",
        "give --acceptance-length, or --survival a report of `evaluate`",
    )
    if tasks := sorted({task_of(figure) for row in rows for figure in row.acceptance_length}):
        what, do = f"{what} at this task", did_you_mean(task, tasks) or f"there are: {', '.join(tasks)}"
    elif drafter is not None and (others := _published_at(task, ours)) is not None:
        row, figure = others
        do += f"; --acceptance-length {figure.value:g} assumes that of {row.repository}"
    elif drafter is not None and (own := next((row for row in catalogue().drafters if _is(row, drafter)), None)):
        what += f" (the figures of {own.repository} are for {own.target})"
    return UserError(what, where=f"--task {task}", do=do)


def published(target: str, drafter: str) -> str:
    """Published acceptance lengths of a drafter beside a target, by task; "" where there are none."""
    figures = (figure for row in catalogued_with(target) if _is(row, drafter) for figure in row.acceptance_length)
    return ", ".join(f"{task_of(one)} {one.value:g}" for one in figures)


def from_report(path: Path, task: str | None, block_size: int, context: int | None = None) -> ExpectedAcceptance:
    """Survival measured by `evaluate --output` or by `bench`; slots that were not measured survive as the last one did.

    Args:
        context: tokens before a step: where no task is named and the report has acceptance by length (`by.length`:
            `4096-8191` -> figures), the range that has it, or the nearest one, of those with FEWEST_STEPS.

    Raises:
        UserError: it is no such report, has no such task, or tells no survival.
    """
    where = f"--survival {path}"
    report = read_json(path)
    try:
        by_length = report.get("by", {}).get("length")
        told = {name: _distance(name, context or 0) for name, one in (by_length or {}).items() if _is_known(one)}
        if told and task is None and context is not None:
            nearest = min(told, key=told.__getitem__)
            survival, measured = by_length[nearest]["survival"], f"contexts of {nearest} tokens"
        elif "points" in report:
            survival, measured = _of_bench(report["points"]), "bench"
        else:
            measured = _task_of(report["tasks"], task, where)
            survival = report["tasks"][measured][AS_IT_IS]["survival"]
        known = [float(share) for share in takewhile(lambda share: share is not None, survival[: block_size - 1])]
    except (KeyError, TypeError, ValueError, AttributeError):
        do = "give the JSON of `evaluate --output` or of `bench`"
        raise UserError("no report", where=where, do=do) from None
    if not known:
        raise UserError("it tells no survival", where=where, do="measure with a fixed width")
    if not all(0 <= share <= 1 for share in known):
        raise UserError("a share of its survival is not from 0 to 1", where=where, do="measure it again")
    if any(later > share + RISE for share, later in pairwise(known)):
        what = "its survival rises: a slot survives only where the slot before it did"
        raise UserError(what, where=where, do="measure it again, with a fixed width")
    known, seen = list(accumulate(known, min)), len(known)
    conditional = min(1.0, known[-1] / known[-2]) if len(known) > 1 and known[-2] else known[-1]
    while len(known) < block_size - 1:
        known.append(known[-1] * conditional)
    source = f"measured: {measured} of {path.name}"
    if seen < len(known):
        source += f", {seen} of {len(known)} slots; the {len(known) - seen} others are extrapolated"
    return _expected(known, source)


def _is_known(figures: Mapping[str, Any]) -> bool:
    # With fewer steps the survival is a guess.
    return bool(figures["survival"]) and figures["survival"][0] is not None and figures["steps"] >= FEWEST_STEPS


def _distance(lengths: str, context: int) -> int:
    first, last = map(int, lengths.split("-"))
    return max(first - context, context - last, 0)


def _expected(survival: Sequence[float], source: str) -> ExpectedAcceptance:
    return ExpectedAcceptance(f"\N{GREEK SMALL LETTER TAU} {1 + sum(survival):.2f}", tuple(survival), source)


def _task_of(tasks: Mapping[str, Any], task: str | None, where: str) -> str:
    name = next(iter(tasks)) if task is None and len(tasks) == 1 else None
    if task is not None:
        name = next((one for one in tasks if one.lower() == task.lower()), None)
    if name is None:
        do = (task and did_you_mean(task, tasks)) or f"give --task one of: {', '.join(tasks)}"
        raise UserError("which task?" if task is None else f"no task {task!r}", where=where, do=do)
    return name


def _of_bench(points: Sequence[Mapping[str, Any]]) -> Sequence[float]:
    # A fixed width before others; then the point that verified most slots, then the one with most verifications.
    def order(point: Mapping[str, Any]) -> tuple[bool, int, float]:
        acceptance = point["acceptance"]
        return point["variant"].startswith("fixed"), len(acceptance["survival"]), acceptance["verifications"] or 0

    told = [point for point in points if point["acceptance"].get("survival")]
    survival: Sequence[float] = max(told, key=order)["acceptance"]["survival"] if told else ()
    return survival
