"""From the answers on record to findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_serve.proving.lossless import diagnosis
from dflash_serve.proving.lossless.findings import Difference, DistributionComparison, Findings, TokenComparison
from dflash_serve.proving.lossless.near_tie import Piece, Scored, classify, first_difference
from dflash_serve.proving.lossless.plan import SEEDED, Case, Plan
from dflash_serve.proving.lossless.power import smallest_deviation
from dflash_serve.proving.lossless.record import WITH, WITHOUT, Record
from dflash_serve.speculation.statistics import AcceptanceStatistics


def compare(
    plan: Plan, record: Record, sampled: Sequence[DistributionComparison], reading: AcceptanceStatistics
) -> Findings:
    """The verdict and all it rests on.

    Args:
        sampled: of each of the plan's sampled cases, looked at while the answers came.
        reading: what the drafter was worth meanwhile.
    """
    greedy = [_tokens(plan, record, case) for case in plan.greedy_cases]
    seeded = _tokens(plan, record, SEEDED) if plan.same_seeds else None
    found = diagnosis.faults(greedy, sampled, seeded)
    reasons = tuple(diagnosis.doubts(greedy, sampled, reading.accepted, seeded))
    pairs = zip(plan.sampled_cases, sampled, strict=True)
    return Findings(
        verdict=diagnosis.verdict_of(found, reasons),
        faults=found,
        reasons=reasons,
        unit=record.unit,
        greedy=tuple(greedy),
        sampled=tuple(_with_power(plan, record, case, one) for case, one in pairs),
        seeded=seeded,
        accepted=reading.accepted,
        acceptance_length=reading.acceptance_length,
    )


def _tokens(plan: Plan, record: Record, case: Case) -> TokenComparison:
    if case.name in record.refused:
        zero: Any = dict.fromkeys(("identical", "tokens", "compared"), 0)
        return TokenComparison(case=case.name, prompts=plan.prompts, **zero, refused=record.refused[case.name])
    sides = record.both(case, plan.prompts)
    positions = [first_difference(*pair) for pair in zip(*sides, strict=True)]
    return TokenComparison(
        case=case.name,
        prompts=plan.prompts,
        identical=positions.count(None),
        tokens=sum(map(len, sides[0])),
        compared=sum(len(a) if p is None else p for a, p in zip(sides[0], positions, strict=True)),
        differences=tuple(
            _difference(plan, record, case, index, position, *(side[index] for side in sides))
            for index, position in enumerate(positions)
            if position is not None
        ),
    )


def _difference(
    plan: Plan, record: Record, case: Case, index: int, position: int, plain: list[Piece], other: list[Piece]
) -> Difference:
    scored = [record.score(side, case, index) for side in (WITHOUT, WITH)]
    kind, gap = classify(plain, other, position, *scored, params=case.params, noise=plan.noise)
    if case is SEEDED:  # no score tells how close a draw was to the edge between two tokens
        kind, gap = "unscored", None
    return Difference(
        prompt=index + 1,
        position=position,
        with_speculation=_shown(other, position, scored[1]),
        without_speculation=_shown(plain, position, scored[0]),
        gap=gap,
        kind=kind,
    )


def _shown(pieces: list[Piece], position: int, scored: Scored | None) -> str | None:
    """A token for a reader: its number and, where the engine spelt it when asked again, its text."""
    if position >= len(pieces):
        return None
    piece = pieces[position]
    same = scored is not None and scored.pieces[position : position + 1] == [piece]
    return str(piece) if scored is None or not same or scored.token == piece else f"{scored.token!r} ({piece})"


def _with_power(plan: Plan, record: Record, case: Case, found: DistributionComparison) -> DistributionComparison:
    """What the last look could have seen, from the answers of the plain side."""
    if found.differs or found.refused:
        return found
    answers = record.answers(WITHOUT, case, found.samples)
    least = smallest_deviation(answers, found.samples, found.looks[-1].false_alarm, plan.power)
    return found.model_copy(update={"smallest_deviation": least})
