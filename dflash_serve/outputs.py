"""What a request gives back, the same from every engine of ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dflash_serve.speculation.statistics import AcceptanceStatistics

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class TokenLogprob:
    """Log probabilities of one token: of the target's raw logits, before bias, penalties, temperature and grammar."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens at its place and theirs, as many as were asked for."""


@dataclass
class Chunk:
    """One step's news of one request."""

    index: int
    """Which of the prompts it belongs to."""
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    """None while the request goes on."""
    logprobs: list[TokenLogprob] | None = None
    """One for each of `token_ids`; None where they were not asked for."""


@dataclass
class RequestOutput:
    """A finished request."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    statistics: AcceptanceStatistics = field(repr=False)
    """Acceptance over its decoding steps."""
    logprobs: list[TokenLogprob] | None = None
    """One for each of `token_ids`; None where they were not asked for."""
