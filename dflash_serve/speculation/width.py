"""The width policy: how many slots of each block to verify, down to one (speculation off). Needs no torch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from dflash_serve.speculation.allocation import Choices, Integers, choices_of
from dflash_serve.speculation.belief import Matrix, Vector
from dflash_serve.speculation.costs import CostModel, StepCosts
from dflash_serve.speculation.survival import SurvivalEstimate


@dataclass(frozen=True)
class Step:
    """What a decoding step came to, request by request."""

    request_ids: Sequence[Hashable]
    widths: Sequence[int]
    """Slots verified."""
    accepted: Sequence[int]
    """Drafted tokens accepted, less than the width."""
    seconds: float | None = None
    """How long the whole step took; None = unknown, or it did other work, too (a prompt)."""
    context_tokens: int = 0
    """K/V tokens of all requests together."""


class WidthPolicy(Protocol):
    """What an engine asks before each decoding step, and tells after it.

    With several ranks one of them asks and tells the others: what it answers depends on times that it measured.
    """

    @property
    def resting(self) -> bool:
        """Speculation has been off for long: an engine may stop doing what only drafts need."""
        ...

    def widths(self, request_ids: Sequence[Hashable], context_tokens: int = 0) -> list[int]:
        """Widths for the coming step, one per request; all 1: do not draft."""
        ...

    def observe(self, step: Step) -> None:
        """What a step came to. Requests may have got less than was asked for them."""
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
    def resting(self) -> bool:
        return self.width == 1

    def widths(self, request_ids: Sequence[Hashable], context_tokens: int = 0) -> list[int]:
        return [self.width] * len(request_ids)

    def observe(self, step: Step) -> None:
        pass

    def forget(self, request_id: Hashable) -> None:
        pass


CREDIT: Final = 1.5
"""Most that may be spent at once on finding out, in steps without speculation."""
DEBT: Final = 6.0
"""How far bad luck may take the account below nothing, in the same."""
REFILL: Final = 0.002
"""What every step adds: the share of all time that may go into finding out for ever."""
TRIFLE: Final = 0.001
"""A price, as a share of a step, that needs no account."""
REST: Final = 64
"""Steps without a draft after which speculation is resting."""


class AutoWidth:
    """The widths that are fastest by what is known of survival and costs, and now and then those that may be.

    Both are learnt from every step (`SurvivalEstimate`, `StepCosts`), and both come with a spread. The policy takes
    the widths that are best by the means (`exploit`), unless wider ones would be best if things stood as well as they
    may ("optimism in the face of uncertainty"): then it tries these, or as much of them as it can pay for. So it
    explores at the margin, where one more slot costs next to nothing, and seldom where a draft is dear. Where a step
    without a draft might be faster than known, it tries that.

    The account (a conservative bandit; Wu et al. 2016, with speculation off as the baseline whose reward is known):
    every step pays in REFILL; every step with a draft pays in the tokens it gained per request, less its time in steps
    without speculation; the account holds CREDIT at most. Exploring needs a balance that covers its price. Below
    -DEBT nothing is drafted. So, by the costs as they are known, in any stretch of T steps, whatever the drafter does:

        time lost against off <= CREDIT + DEBT + (one step with a draft of which nothing is accepted) + REFILL x T,

    in steps without speculation. With a drafter that is never right it is far less, as the means follow.

    Args:
        cost: measured seconds; its draft cost must include everything that speculation adds to a step.
        block_size: B, the widest width.
        allowed_widths: as for `choose_widths`.
        known_survival: of slots 1.., from training, an evaluation or the last run; None = nothing is known.
    """

    def __init__(
        self,
        cost: CostModel,
        block_size: int,
        allowed_widths: Sequence[int] | None = None,
        known_survival: Sequence[float] | None = None,
    ) -> None:
        if block_size < 2:
            raise ValueError("AutoWidth: need block_size >= 2")
        if allowed_widths is not None and not all(1 <= width <= block_size for width in allowed_widths):
            raise ValueError(f"allowed_widths {list(allowed_widths)}: use widths from 1 to {block_size}")
        self.block_size, self.allowed_widths = block_size, allowed_widths
        self.costs = StepCosts(cost)
        self.survival = SurvivalEstimate(block_size - 1, known_survival)
        self._account = CREDIT
        self._off_for = 0

    @property
    def resting(self) -> bool:
        return self._off_for >= REST

    def widths(self, request_ids: Sequence[Hashable], context_tokens: int = 0) -> list[int]:
        if not request_ids:
            return []
        self._account = min(CREDIT, self._account + REFILL)
        known = self.survival.survival(request_ids)
        exploit = self._options(known, known, context_tokens)
        best = exploit.best
        if self._account < -DEBT:
            widths = exploit.choices.widths(0)
        else:
            explored = self._explored(request_ids, known, exploit, context_tokens)
            widths = exploit.choices.widths(best) if explored is None else explored
        self._off_for = self._off_for + 1 if widths.max() == 1 else 0
        return [int(width) for width in widths]

    def observe(self, step: Step) -> None:
        widths, accepted = np.asarray(step.widths), np.asarray(step.accepted)
        if not len(widths):
            return
        if not ((accepted >= 0) & (accepted < widths) & (widths <= self.block_size)).all():
            raise ValueError(f"accepted {accepted} of widths {widths}: need 0 <= accepted < width <= {self.block_size}")
        requests, rows = len(widths), int(widths.sum())
        drafted = int((widths > 1).sum())
        if drafted and self.allowed_widths is not None:
            drafted = requests
        if drafted:
            off, on = self.costs.of_steps(np.array([requests, rows]), np.array([0, drafted]), step.context_tokens)
            self._account = min(CREDIT, self._account + 1 + accepted.sum() / requests - on / off)
        self.survival.observe(step.request_ids, widths, accepted)
        if step.seconds is not None and step.seconds > 0:
            self.costs.observe(rows, drafted, step.context_tokens, step.seconds)

    def forget(self, request_id: Hashable) -> None:
        self.survival.forget(request_id)

    def _explored(
        self, request_ids: Sequence[Hashable], known: Matrix, exploit: _Options, context_tokens: int
    ) -> Integers | None:
        """Widths worth a trial that the account can pay for; None = none."""
        best = exploit.best
        hoped = self._options(self.survival.optimistic(request_ids), known, context_tokens)
        price = exploit.rate[best] / hoped.rate - 1
        funds = max(TRIFLE, self._account if best else self._account / 2)  # what is off is learnt of in several trials
        payable = np.flatnonzero(price[: hoped.wish + 1] <= funds)
        if len(payable) and hoped.choices.rows[payable[-1]] > exploit.choices.rows[best]:
            if best:  # a trial in place of off is paid for when it is seen what it gained
                self._account -= max(0.0, float(price[payable[-1]]))
            return hoped.choices.widths(int(payable[-1]))
        loss = exploit.rate[best] / exploit.rate[0] - 1
        doubt = self.costs.doubt(exploit.choices.requests, int(exploit.choices.rows[best])) if best else 0.0
        if best and np.log1p(loss) < doubt and loss <= self._account:
            self._account -= loss
            return exploit.choices.widths(0)
        return None

    def _options(self, survival: Matrix, known: Matrix, context_tokens: int) -> _Options:
        """The choices by a survival, and what they come to by it and by the one that is known."""
        choices = choices_of(survival, self.allowed_widths)
        seconds = self.costs.of_steps(choices.rows, choices.drafted, context_tokens)
        return _Options(choices, choices.tokens(known) / seconds, choices.tokens(survival) / seconds)


@dataclass(frozen=True)
class _Options:
    choices: Choices
    rate: Vector
    """[M] tokens per second of each choice, by what is known."""
    hoped: Vector
    """[M] the same by the survival that the choices were made for."""

    @property
    def best(self) -> int:
        return int(np.argmax(self.rate))

    @property
    def wish(self) -> int:
        return int(np.argmax(self.hoped))
