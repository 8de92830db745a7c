"""Answers of a real server with the counts of its drafts: a pair of halves is compared with one server by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from dflash_serve.client.metrics import read_acceptance
from dflash_serve.speculation.statistics import AcceptanceStatistics


class Answering(Protocol):
    """A client of a real server."""

    @property
    def url(self) -> str:
        """Address of the server."""
        ...

    def tokens(self, prompts: Sequence[str | Sequence[int]], tokens: int = 24, streams: int = 1) -> list[list[int]]:
        """The answers' token ids."""
        ...


class Answers(NamedTuple):
    """Tokens and counts of one server, or of several behind a router."""

    tokens: list[list[int]]
    counts: AcceptanceStatistics

    @classmethod
    def of(cls, server: Answering, metrics: str, prompts: Sequence[str], tokens: int) -> Answers:
        """Greedy answers, one after the other.

        Args:
            metrics: address of the server that counts.
            tokens: of each answer.
        """
        before = read_acceptance(metrics)
        answers = server.tokens(prompts, tokens)
        return cls(answers, read_acceptance(metrics).since(before))

    @property
    def told(self) -> str:
        """Its acceptance as words."""
        length = self.counts.acceptance_length
        return f"{length:.4f} ({self.counts.verifications:.0f} steps, {self.counts.accepted:.0f} accepted)"
