"""What is measured, and in which order: interleaved, so that a machine's moods fall on all ways alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from dflash_serve.common.frozen import Frozen, PositiveInt


class Workload(Frozen):
    """What every request asks for. Runs of different workloads are never put side by side."""

    dataset: str
    """As it is called in the report."""
    prompts_sha256: str | None
    """Of the prompts; None where aiperf loads them itself."""
    output_tokens: PositiveInt
    """Longest answer."""
    ignore_eos: bool
    """Every answer is as long as that."""
    temperature: Annotated[float, Field(ge=0)]
    """0 is greedy."""


class Sweep(Frozen):
    """How much is measured; more of it can be added to what is there."""

    concurrencies: tuple[PositiveInt, ...]
    rounds: PositiveInt
    requests_per_user: PositiveInt
    """Requests of a run = this times its concurrency, but at least `min_requests`."""
    min_requests: PositiveInt

    def requests(self, concurrency: int) -> int:
        """Requests of one run."""
        return max(self.min_requests, self.requests_per_user * concurrency)


class Cell(NamedTuple):
    """One run of aiperf."""

    way: str
    concurrency: int
    round: int


def schedule(ways: Sequence[str], sweep: Sweep, *, in_turn: bool) -> list[Cell]:
    """All runs in order.

    Args:
        ways: names.
        sweep: its concurrencies and rounds.
        in_turn: one server at a time: ways change once a round, not at each concurrency.
    """
    cells: list[Cell] = []
    for turn in range(sweep.rounds):
        if in_turn:
            cells += [Cell(way, users, turn) for way in _rotated(ways, turn) for users in sweep.concurrencies]
            continue
        for place, users in enumerate(sweep.concurrencies):
            cells += [Cell(way, users, turn) for way in _rotated(ways, turn + place)]
    return cells


def _rotated(ways: Sequence[str], by: int) -> list[str]:
    """Nobody is always first."""
    start = by % len(ways)
    return [*ways[start:], *ways[:start]]
