"""A request on its way between the event loop, where clients are, and the worker's thread, where steps are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from dflash_serve.outputs import Chunk
from dflash_serve.speculation.params import SamplingParams

from ..grammar import Grammar
from ..request import Request


@dataclass(frozen=True)
class Part:
    """One request to generate: one of `n`, of one prompt."""

    index: int
    token_ids: list[int]
    params: SamplingParams
    grammar: Grammar | None = None


@dataclass(frozen=True)
class News:
    """A chunk of one part; `ended` with the last."""

    chunk: Chunk
    ended: Request | None = None


@dataclass(frozen=True)
class Failure:
    """A part could not go on; the ticket is over. `status` is what to answer if nothing has been sent yet."""

    message: str
    status: int = 500


@dataclass
class Ticket:
    """The parts of one request, and the mailbox that its handler reads."""

    parts: list[Part]
    salt: str = ""
    events: asyncio.Queue[News | Failure] = field(default_factory=asyncio.Queue)
    arrived: float = field(default_factory=monotonic)
    cancelled: bool = False
    wake: Callable[[], None] = lambda: None
    """Set by the worker that has it."""

    def cancel(self) -> None:
        """Nobody wants the answer any more; its slots are free before the next step. Harmless when it is over."""
        self.cancelled = True
        self.wake()
