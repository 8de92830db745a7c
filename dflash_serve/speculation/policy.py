"""The interface between an engine and a width policy, and the policy of a fixed width."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dflash_serve.speculation.costs import Context


@dataclass(frozen=True)
class Step:
    """The result of a decoding step, request by request."""

    request_ids: Sequence[Hashable]
    widths: Sequence[int]
    """Slots verified."""
    accepted: Sequence[int]
    """Drafted tokens accepted, less than the width."""
    seconds: float | None = None
    """Time of the whole step; None: unknown, or the step did other work, too (a prompt)."""
    context_tokens: int = 0
    """K/V tokens of all requests together."""

    @property
    def context(self) -> Context:
        return Context(self.context_tokens, len(self.request_ids))


class WidthPolicy(Protocol):
    """Chooses widths before each decoding step and learns from its result.

    With several ranks one of them asks and tells the others: what it answers depends on times that it measured.
    """

    @property
    def paused(self) -> bool:
        """Speculation has been off for long: an engine may stop doing what only drafts need."""
        ...

    def widths(
        self, request_ids: Sequence[Hashable], context_tokens: int = 0, undraftable: Collection[Hashable] = ()
    ) -> list[int]:
        """Widths for the coming step, one per request; all 1: do not draft.

        Args:
            undraftable: requests that cannot be drafted for, whatever they are given here.
        """
        ...

    def observe(self, step: Step) -> None:
        """Takes a step's result. Requests may have got narrower blocks than `widths` chose."""
        ...

    def forget(self, request_id: Hashable) -> None:
        """The request has ended."""
        ...


@dataclass(frozen=True)
class FixedWidth:
    """Always the same width; `FixedWidth(1)` is speculation off."""

    width: int

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width {self.width}: use 1 (speculation off) to the drafter's block_size")

    @property
    def paused(self) -> bool:
        return self.width == 1

    def widths(
        self, request_ids: Sequence[Hashable], context_tokens: int = 0, undraftable: Collection[Hashable] = ()
    ) -> list[int]:
        return [self.width] * len(request_ids)

    def observe(self, step: Step) -> None:
        pass

    def forget(self, request_id: Hashable) -> None:
        pass
