"""What a verification found, in the shape of its report."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from dflash_serve.common.frozen import Frozen
from dflash_serve.proving.lossless.near_tie import Kind

Verdict = Literal["lossless", "not lossless", "could not tell"]
EXIT_CODES: dict[Verdict, int] = {"lossless": 0, "not lossless": 1, "could not tell": 2}


class Fault(StrEnum):
    """What kind of fault the failed comparisons fit; `diagnosis` says how it is told."""

    STALE_STATE = "stale state"
    PENALTIES = "penalties"
    GREEDY_SAMPLING = "sampling turned greedy"
    DISTRIBUTION = "wrong distribution"
    SEEDS = "seeds"


class Difference(Frozen):
    """Where two greedy answers part."""

    prompt: int
    """From 1 on, in the order of the prompt set."""
    position: int
    """Of the first differing token, from 0 on."""
    with_speculation: str | None
    """The token there; None = the answer had ended."""
    without_speculation: str | None
    gap: float | None
    """log p(token without) - log p(token with), by the plain side, in nats; None = it did not say."""
    kind: Kind


class TokenComparison(Frozen):
    """Answers that must be the same token for token."""

    case: str
    prompts: int
    identical: int
    tokens: int
    """Of the answers without speculation."""
    compared: int
    """Of them, those up to the first difference: what comes after it follows from it."""
    differences: tuple[Difference, ...] = ()
    refused: str | None = None
    """Why there are no answers, by the server that did not give them."""

    def of_kind(self, *kinds: Kind) -> int:
        return sum(difference.kind in kinds for difference in self.differences)


class Look(Frozen):
    """A permutation test over the samples so far."""

    samples: int
    """On either side."""
    p_value: float
    false_alarm: float
    """The rate that this look may spend; at or below it the distributions differ."""


class DistributionComparison(Frozen):
    """Sampled answers that must come from one distribution."""

    case: str
    prompt: int
    samples: int
    looks: tuple[Look, ...] = ()
    differs: bool = False
    smallest_deviation: float | None = None
    """Total variation of a next-token distribution that would have been seen with the stated power."""
    repeats_with: float | None = None
    """How far the beginning of an answer fixes its next token; 1 = as if greedy."""
    repeats_without: float | None = None
    refused: str | None = None


class Findings(Frozen):
    """Everything that was compared, and what it comes to."""

    verdict: Verdict
    faults: tuple[Fault, ...]
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
