"""What a request gives back, the same from every engine of ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dflash_serve.speculation.statistics import AcceptanceStatistics

FinishReason = Literal["stop", "length"]


@dataclass
class Chunk:
    """One step's news of one request."""

    index: int
    """Which of the prompts it belongs to."""
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    """None while the request goes on."""


@dataclass
class RequestOutput:
    """A finished request."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    statistics: AcceptanceStatistics = field(repr=False)
    """Acceptance over its decoding steps."""
