"""The width policy: how many slots of each block to verify, down to one (speculation off). Needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from itertools import groupby
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dflash_serve.speculation.account import Account
from dflash_serve.speculation.allocation import choices_of
from dflash_serve.speculation.belief import Vector
from dflash_serve.speculation.costs import BelievedCosts, Context, CostModel, LearntCosts, StepCosts
from dflash_serve.speculation.decision import Decision
from dflash_serve.speculation.policy import Step
from dflash_serve.speculation.survival import SurvivalEstimate

MARGIN: Final = 0.005
"""What a wider or a narrower block than the best may cost beside it, as a share of the step, to learn of it."""
TELLING: Final = 1 / 3
"""What a step without a draft must settle, of what is not known of costs, to be tried for that."""
READY: Final = 0.015
"""What drafts must gain at least: being ready for them costs an engine that much beside the steps themselves."""
REST, AWAKE = 64, 8
"""Steps without a draft after which speculation is resting; so many are left after a draft that was only a trial."""
FEW: Final = 8
"""Requests up to which that holds; of more, steps are longer, and with the square of their number fewer will do."""
ASLEEP: Final = 8
"""How many times as long as speculation woke for others to join it sleeps before it does so again..."""
WAKING: Final = 0.05
"""...but for drafts that gain so much."""
HELD: Final = 8
"""Steps that a decision may stand for."""
STANDS: Final = 0.1
"""Seconds after which it does not stand for one more, but for one not to draft while speculation is resting."""


class AutoWidth:
    """The widths that are fastest by what is known of survival and costs, and now and then those that may be.

    Both are learnt from every step (`SurvivalEstimate`, `StepCosts`), and both come with a spread. The policy takes
    the widths that are fastest by the means, unless wider ones would be if things stood as well as they may ("optimism
    in the face of uncertainty"): then it tries these, or as much of them as it may pay for. So it explores at the
    margin, where one more slot costs next to nothing, and seldom where a draft is dear. Every other decision takes the
    narrowest of widths that are as good as the best, for what one more slot costs is only known where both are served.
    While steps without a draft may be faster still, by what is not known of their costs, it tries one of these first.

    Deciding and learning take their time in every step, the more so as the model's weights have passed through the
    caches since. So a decision stands for up to HELD steps where these are short or speculation rests, unless requests
    change (a few may come and go while none is drafted for), one step is to settle something, or a draft is paid from
    less than TRUST; these steps are learnt at once.

    An `Account` limits what that costs. So, by the costs as they are known, after T steps, whatever the drafter did:

        time lost against off <= START + DEBT + (one step of which nothing is accepted) + FORGIVEN x T,

    in steps without speculation, and in any stretch of T steps the same with CREDIT in the place of START. That is the
    worst; with a drafter that is never right about 1 % of the first 500 steps is lost, as the means follow. How far it
    stays behind the best fixed width and behind an oracle is measured by `benchmarks/policy.py`.

    Args:
        cost: measured seconds; its draft cost must include everything that speculation adds to a step.
        block_size: B, the widest width.
        allowed_widths: as for `choose_widths`.
        known_survival: of slots 1.., from training, an evaluation or the last run; None = nothing is known.
        believed: the costs are taken as they are, and no step corrects them.
        learnt: what an earlier run learnt of the costs.
    """

    def __init__(
        self,
        cost: CostModel,
        block_size: int,
        allowed_widths: Sequence[int] | None = None,
        known_survival: Sequence[float] | None = None,
        *,
        believed: bool = False,
        learnt: LearntCosts | None = None,
    ) -> None:
        if block_size < 2:
            raise ValueError("AutoWidth: need block_size >= 2")
        if allowed_widths is not None and not all(1 <= width <= block_size for width in allowed_widths):
            raise ValueError(f"allowed_widths {list(allowed_widths)}: use widths from 1 to {block_size}")
        self.block_size, self.allowed_widths = block_size, allowed_widths
        self.costs = BelievedCosts(cost) if believed else StepCosts(cost, learnt)
        self.survival = SurvivalEstimate(block_size - 1, known_survival)
        self.account = Account(trusted=known_survival is not None)
        self._narrow = False
        """This decision prefers the narrowest of what is as good as the best; the next one the widest."""
        self._off_for, self._rest = 0, REST
        """Steps without a draft, and those after which speculation rests."""
        self._wakes, self._asleep = False, 0
        """It is awake until all can be drafted for; steps at rest for which it is not to wake."""
        self._nobody = False
        """No request of the last step could be drafted for."""
        self._unlearnt: list[Step] = []
        self._ended: list[Hashable] = []
        """Requests that are forgotten when these are learnt."""
        self._decision: Decision | None = None

    @property
    def resting(self) -> bool:
        return self._off_for >= self._rest

    def widths(
        self, request_ids: Sequence[Hashable], context_tokens: int = 0, undraftable: Collection[Hashable] = ()
    ) -> list[int]:
        if not request_ids:
            return []
        self.account.refill()
        self._rest = max(2 * AWAKE, int(REST * min(1.0, FEW / len(request_ids)) ** 2))
        self._nobody = len(undraftable) == len(request_ids)
        ids, decision = list(request_ids), self._decision
        if decision is None or not decision.holds_for(ids):
            decision = self._decision = self._decide(ids, undraftable, Context(context_tokens, len(ids)))
        decision.left -= 1
        self.account.curiosity -= decision.price
        rested = min(self._off_for, self._rest - AWAKE) if decision.is_trial else 0
        self._off_for = rested if decision.drafts else self._off_for + (not self._wakes)
        self._asleep = self._asleep + ASLEEP if self._wakes else max(0, self._asleep - self.resting)
        self._wakes = self._wakes and bool(undraftable)
        return decision.widths.copy() if decision.drafts else [1] * len(ids)

    def observe(self, step: Step) -> None:
        if not step.widths:
            return
        widths, accepted = list(step.widths), list(step.accepted)
        if not all(0 <= count < width <= self.block_size for width, count in zip(widths, accepted, strict=True)):
            raise ValueError(f"accepted {accepted} of widths {widths}: need 0 <= accepted < width <= {self.block_size}")
        if max(widths) > 1:
            self.account.settle(1 + sum(accepted) / len(widths), self._cost(widths, step.context))
            if self.account.balance <= 0:
                self._decision = None
        elif self._decision and (self._decision.is_trial or (self._nobody and self._decision.drafts)):
            # who joins from now on can be drafted for
            self.account.curiosity += self._decision.price
            self._off_for, self._wakes = 0, True
            self._decision = Decision(list(step.request_ids), [1] * len(widths), left=HELD - 1)
        self._unlearnt.append(step)
        if self._decision is None or not self._decision.left:
            self._learn()

    def forget(self, request_id: Hashable) -> None:
        self._ended.append(request_id)
        if not self._unlearnt:
            self._learn()

    def _decide(self, request_ids: list[Hashable], undraftable: Collection[Hashable], context: Context) -> Decision:
        """For those who can be drafted for; for all where none can: whether to wake for others."""
        self._learn()
        known, feared, hoped = self.survival.bounds(request_ids)
        if undraftable and not self._nobody:
            lost = [request_id in undraftable for request_id in request_ids]
            known[lost], feared[lost], hoped[lost] = 0.0, 0.0, 0.0
        sleeps = self.resting and self._asleep > 0
        ready = WAKING if sleeps and self._nobody else READY
        choices = choices_of(known, self.allowed_widths)
        seconds = self.costs.of_steps(choices.rows, choices.drafted, context)
        doubt = np.where(choices.drafted > 0, self.costs.doubt(len(known), choices.rows), 0.0)
        cost = seconds / seconds[0]
        loss = cost - choices.tokens(feared) / len(known)
        paid = np.where(choices.drafted > 0, seconds, seconds / (1 + ready))
        rate, hoped_for = choices.tokens(known) / paid, choices.tokens(hoped) / paid
        self._narrow = not self._narrow
        payable = self.account.payable(loss, rate, len(known))
        funds = 0.0 if sleeps else self.account.funds(len(known))
        choice, price, stands = self._choice(rate, hoped_for, cost, payable, doubt, funds)
        drafts, widths = choice > 0, choices.widths(choice).tolist()
        held = self._held(drafts, seconds[choice]) if stands else 1
        is_trial = drafts and not stands
        return Decision(request_ids, widths, held, drafts, is_trial, float(cost[choice]), price)

    def _held(self, drafts: bool, seconds: float) -> int:
        """Steps that a decision stands for; one draft while what it may lose is more than the time to learn from it."""
        if drafts and not self.account.is_comfortable:
            return 1
        return HELD if self.resting and not drafts else min(HELD, 1 + int(STANDS / seconds))

    def _cost(self, widths: list[int], context: Context) -> float:
        """What a step takes, in steps without speculation."""
        if self._decision and widths == self._decision.widths:
            return self._decision.cost
        rows, drafted = np.array([len(widths), sum(widths)]), np.array([0, self._drafted(widths)])
        off, on = self.costs.of_steps(rows, drafted, context)
        return float(on / off)

    def _drafted(self, widths: Sequence[int]) -> int:
        """Requests that a step drafted for."""
        drafted = sum(width > 1 for width in widths)
        return len(widths) if drafted and self.allowed_widths is not None else drafted

    def _learn(self) -> None:
        """From all steps of a decision at once; an engine may have taken others."""
        for ids, steps in groupby(self._unlearnt, _drafted_for):
            same = list(steps)
            if ids:
                widths, accepted = [step.widths for step in same], [step.accepted for step in same]
                self.survival.observe(ids, np.array(widths), np.array(accepted))
            else:
                self.survival.pass_by(len(same))
        alike = groupby(self._unlearnt, lambda step: (sum(step.widths), self._drafted(step.widths)))
        for (rows, drafted), steps in alike:
            timed = [(step.seconds, step.context) for step in steps if step.seconds]
            if timed:
                self.costs.observe(rows, drafted, timed[0][1], *(seconds for seconds, _ in timed))
        self._unlearnt.clear()
        for request_id in self._ended:
            self.survival.forget(request_id)
        self._ended.clear()

    def _choice(
        self, rate: Vector, hoped: Vector, cost: Vector, payable: NDArray[np.bool_], doubt: Vector, funds: float
    ) -> tuple[int, float, bool]:
        """Which choice to take, its price beside the best one, and whether it may stand: a trial is for one step.

        Args:
            rate, hoped: [M] tokens per second, as known and at best.
            cost: [M], what the step takes, in steps without speculation.
            payable: [M], what the account allows.
            doubt: [2, M], of the cost beside that of off, and what of it a step without a draft would settle.
            funds: what a trial may cost.
        """
        best, wish = int(np.argmax(np.where(payable, rate, 0.0))), int(np.argmax(hoped))
        if not best:  # costs may stand better than known, too
            wish = int(np.argmax(hoped * np.exp(doubt[0])))
        elif np.log(hoped[wish] / rate[0]) < doubt[0, wish] and doubt[1, wish] > TELLING * doubt[0, wish]:
            return 0, 0.0, False  # so may those of off
        share = 1 - rate / rate[best]
        price = share * cost
        affordable = payable & (price <= funds) & (share <= (MARGIN if best else 1))
        if best and self._narrow:
            narrowest = 1 + int(np.argmax(affordable[1:]))
            return narrowest, max(0.0, float(price[narrowest])), True
        wider = best + 1 + np.flatnonzero(affordable[best + 1 : wish + 1])
        if not len(wider):
            return best, 0.0, True
        return int(wider[-1]), max(0.0, float(price[wider[-1]])), best > 0


def _drafted_for(step: Step) -> list[Hashable]:
    """The requests of a step with a draft; [] of one without."""
    return list(step.request_ids) if max(step.widths) > 1 else []
