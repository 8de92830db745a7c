"""The answer to a request: the chunks of its steps, and its output at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dflash_serve.speculation.statistics import AcceptanceStatistics

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class TokenLogprob:
    """Log probabilities of a token from the target's raw logits, before bias, penalties, temperature and grammar."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens at its position with their log probabilities, as many as the request wants."""


@dataclass
class Chunk:
    """Text and tokens that one step brought one request."""

    index: int  # Number of its prompt
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None  # None before the last chunk
    logprobs: list[TokenLogprob] | None = None  # One for each of `token_ids`; None unless requested


@dataclass
class RequestOutput:
    """A finished request."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    statistics: AcceptanceStatistics = field(repr=False)  # Acceptance in its decoding steps
    logprobs: list[TokenLogprob] | None = None  # One for each of `token_ids`; None unless requested
