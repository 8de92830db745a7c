"""The interface between an engine and a width policy, the policy of a fixed width, and a guard around any policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, TypeVar

from dflash_serve.speculation.costs import Context

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


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


class Pace:
    """Tokens of decoding steps, and those that the policy expected in the same time at the same batch.

    Their quotient is the speculative headroom: 1 where all time goes into decoding the batch, and drafts are accepted
    as expected; less where prompts, waiting and retractions take time from it. The time of a step is that since the
    step before it, if one of its requests was in that one, too; other steps are left out, because the server may have
    been idle.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.gained, self.expected = 0.0, 0.0
        self._clock, self._last = clock, 0.0
        self._ids: frozenset[Hashable] = frozenset()

    def add(self, step: Step, rate: float) -> None:
        """Adds a step whose requests should gain `rate` tokens/s each."""
        if not step.request_ids:
            return
        now, last, before = self._clock(), self._last, self._ids
        self._last, self._ids = now, frozenset(step.request_ids)
        if rate and not before.isdisjoint(step.request_ids):
            self.gained += len(step.widths) + sum(step.accepted)
            self.expected += rate * len(step.widths) * (now - last)


class GuardedPolicy:
    """A policy inside an engine's scheduler, where an error would end all requests.

    A policy that fails is logged once, and from then on all blocks have `whole_block` slots.
    """

    def __init__(self, policy: WidthPolicy, whole_block: int) -> None:
        self.policy: WidthPolicy = policy
        self._fallback = FixedWidth(whole_block)

    @property
    def paused(self) -> bool:
        return self._guarded(lambda policy: policy.paused)

    def widths(
        self, request_ids: Sequence[Hashable], context_tokens: int = 0, undraftable: Collection[Hashable] = ()
    ) -> list[int]:
        return self._guarded(lambda policy: policy.widths(request_ids, context_tokens, undraftable))

    def observe(self, step: Step) -> None:
        self._guarded(lambda policy: policy.observe(step))

    def forget(self, request_id: Hashable) -> None:
        self._guarded(lambda policy: policy.forget(request_id))

    def _guarded(self, ask: Callable[[WidthPolicy], Answer]) -> Answer:
        try:
            return ask(self.policy)
        except Exception:
            log.exception("dflash-serve: the choice of widths failed; whole blocks are verified from now on")
            self.policy = self._fallback
            return ask(self.policy)
