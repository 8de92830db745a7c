"""What a verification found: from the comparisons that failed to the kind of fault, and to the verdict.

| what fails | fault | what it means |
|---|---|---|
| greedy answers without penalties | stale state | the target saw something else than the accepted tokens: K/V of rejected tokens kept, positions off, tokens committed that were not accepted. Everything sampled fails with it, so nothing else is named. |
| greedy answers, but only with penalties | penalties | penalties inside a block do not count the block's own tokens |
| sampled answers, and with speculation a beginning fixes its next token (`distributions.repeats`) where plainly it does not | sampling turned greedy | drafted tokens are judged against the most probable token instead of a draw |
| sampled answers otherwise, greedy ones being right | wrong distribution | the rule of acceptance or the residual is wrong |
| sampled answers, but only with penalties | penalties | as above |
| only answers of the same seed | seeds | the distribution stands as far as was seen, but not the promise that a seed gives the same tokens |

A pattern is evidence, not proof: a fault that shows in only some of its comparisons may be taken for a neighbour.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Literal

from dflash_serve.common.frozen import Frozen
from dflash_serve.speculation.statistics import AcceptanceStatistics
from dflash_serve.verify.distributions import DistributionComparison
from dflash_serve.verify.questions import PENALISED
from dflash_serve.verify.tokens import TokenComparison

Verdict = Literal["lossless", "not lossless", "could not tell"]
EXIT_CODES: dict[Verdict, int] = {"lossless": 0, "not lossless": 1, "could not tell": 2}
FEWEST = 64
"""Samples a side below which no deviation worth the name could be seen."""
SEED_SLIPS = 1
"""Seeded answers that rounding may change: a draw may fall on the edge between two tokens, once in some 10^5."""


class FaultKind(StrEnum):
    """What kind of fault the failed comparisons fit, by the table above."""

    STALE_STATE = "stale state"
    PENALTIES = "penalties"
    GREEDY_SAMPLING = "sampling turned greedy"
    DISTRIBUTION = "wrong distribution"
    SEEDS = "seeds"


class Findings(Frozen):
    """Everything that was compared, and what it comes to."""

    verdict: Verdict
    faults: tuple[FaultKind, ...]
    reasons: tuple[str, ...]
    """Why it could not be told, or what restricts the verdict."""
    unit: str
    """What was compared: token ids, tokens, or characters."""
    greedy: tuple[TokenComparison, ...]
    sampled: tuple[DistributionComparison, ...]
    seeded: TokenComparison | None
    accepted: float | None
    """Drafted tokens that were accepted on the way; None = the engine does not say."""
    acceptance_length: float | None


def conclude(
    greedy: Sequence[TokenComparison],
    sampled: Sequence[DistributionComparison],
    seeded: TokenComparison | None,
    acceptance: AcceptanceStatistics,
    unit: str,
) -> Findings:
    """The verdict and all that it rests on.

    Args:
        acceptance: of the speculating side while it answered.
        unit: what answers are made of.
    """
    found = faults(greedy, sampled, seeded)
    reasons = tuple(doubts(greedy, sampled, acceptance.accepted, seeded))
    return Findings(
        verdict=verdict_of(found, reasons),
        faults=found,
        reasons=reasons,
        unit=unit,
        greedy=tuple(greedy),
        sampled=tuple(sampled),
        seeded=seeded,
        accepted=acceptance.accepted,
        acceptance_length=acceptance.acceptance_length,
    )


def faults(
    greedy: Sequence[TokenComparison], sampled: Sequence[DistributionComparison], seeded: TokenComparison | None
) -> tuple[FaultKind, ...]:
    """The kinds of fault that the failed comparisons fit, by the table above."""
    broken = {comparison.case for comparison in greedy if comparison.of_kind("fault")}
    shifted = [comparison for comparison in sampled if comparison.differs]
    if broken - PENALISED:
        return (FaultKind.STALE_STATE,)
    found = []
    plainly = [comparison for comparison in shifted if comparison.case not in PENALISED]
    if plainly:
        found.append(FaultKind.GREEDY_SAMPLING if any(map(turned_greedy, plainly)) else FaultKind.DISTRIBUTION)
    if broken or (shifted and not plainly):
        found.append(FaultKind.PENALTIES)
    if not found and seeded is not None and len(seeded.differences) > SEED_SLIPS:
        found.append(FaultKind.SEEDS)
    return tuple(found)


def turned_greedy(comparison: DistributionComparison) -> bool:
    """Whether the beginning of an answer fixes its next token with speculation, and much less so without."""
    with_, without = comparison.repeats_with, comparison.repeats_without
    return with_ is not None and with_ > 0.8 and with_ > (without or 0.0) + 0.2


def verdict_of(found: Sequence[FaultKind], reasons: Sequence[str]) -> Verdict:
    """A fault is certain whatever else could not be told."""
    if found:
        return "not lossless"
    return "could not tell" if reasons else "lossless"


def doubts(
    greedy: Sequence[TokenComparison],
    sampled: Sequence[DistributionComparison],
    accepted: float | None,
    seeded: TokenComparison | None = None,
) -> Iterator[str]:
    """Why the comparisons that did not fail prove less than they should."""
    for comparison in (*greedy, *([seeded] if seeded else ())):
        if comparison.refused:
            without = "; `--no-penalties` verifies the rest" if comparison.case in PENALISED else ""
            yield f"{comparison.case}: refused ({comparison.refused}){without}"
    for comparison in greedy:
        if unstable := comparison.of_kind("unstable"):
            yield f"{comparison.case}: the plain side does not repeat its own answer to {unstable} prompts"
        if unscored := comparison.of_kind("unscored"):
            yield f"{comparison.case}: {unscored} differences, and the engine does not say how close the tokens were"
        if comparison.of_kind("near-tie") and comparison.compared < comparison.tokens / 2:
            yield f"{comparison.case}: near-ties left {comparison.compared} of {comparison.tokens} tokens to compare"
    if greedy and not any(comparison.tokens for comparison in greedy):
        yield "no greedy answer has any token"
    for one in sampled:
        if one.refused:
            yield f"{one.case}: refused ({one.refused}); `--samples 0` verifies greedy decoding alone"
        elif not one.differs and one.samples < FEWEST:
            yield f"{one.case}: {one.samples} samples a side are too few, {FEWEST} are the least"
    if accepted == 0:
        yield "no drafted token was accepted: speculation had no chance to change anything"
