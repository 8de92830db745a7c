"""`width: auto`: verify as many slots of each block as pay, by what served steps teach. Needs no torch.

1. P(slot k accepted | slots before it accepted) = logistic(odds_k + offset): odds_k from counts of the slot, one offset
   for each request (`AcceptanceEstimate`). The survival of slot k is the product over slots 1..k.
2. Seconds of a step = measured seconds x exp(correction). A Kalman filter learns the corrections (`TimeEstimate`).
3. The policy takes the choice of widths (`allocation.choices_of`) with the highest rate = expected tokens / seconds...
4. ...or a wider one, if it would be faster were acceptance one standard error better. Every other decision takes the
   narrowest choice that is as fast as the best: acceptance and times are learnt on both sides of the best choice.
5. It takes a step without a draft when the time of that step could change the decision to draft.
6. A `Budget` in steps without speculation limits losses against off (a conservative bandit, Wu et al. 2016). By the
   step times as known, whatever the drafter does, T steps lose at most START + DEBT + (one step of which nothing is
   accepted) + REFILL x T; in any later stretch of T steps the same with DEBT in the place of START.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt
from operator import ge

import numpy as np
from numpy.typing import NDArray

from dflash_serve.speculation.allocation import Choices, choices_of
from dflash_serve.speculation.costs import NO_CONTEXT, NODES, Context, CostModel, Floats, Integers, LearntCosts
from dflash_serve.speculation.policy import Step

# Chosen in simulated situations. Half and twice of each: docs/benchmarks.md, "The width policy, simulated".
START = 2.5  # steps: the budget's first balance, all of which a useless drafter loses
DEBT = 6.0  # steps: largest overdraft, and largest balance
REFILL = 0.003  # share of steps to learn with; rates that differ by less count as equal
TRIALS = 0.75  # steps: largest budget of trials of choices that are slower as known
LEAST_GAIN = 0.015  # storing context features costs 1.5 % of a step (measured over HTTP)
HOLD = 8  # most steps for which a decision stands
HOLD_SECONDS = 0.1  # a decision takes 0.1 to 0.3 ms, at most 0.3 % of this
PAUSE_AFTER = 256  # tokens without a draft before a pause: 16 steps of 16 requests; not simulated
PRIOR = 0.73  # acceptance of slot 1 of an unknown drafter
NEIGHBOUR_TESTS = 10.0  # most tests that a slot's acceptance counts as for the next slot
OFFSET_SPREAD = 0.6  # standard deviation of requests' offsets, in log-odds
SPREAD = 0.2  # standard deviation of corrections: calibrations are some 20 % off
NOISE = 0.05  # standard deviation of log(a step's time), before any is known
SURPRISE = 3.0  # standard deviations from which a step's time is surprising
MEMORY = 1000.0  # steps after which what was learnt has 1/e of its weight


class AcceptanceEstimate:
    """Survival of each slot of each request.

    A slot's acceptance is shrunk towards that of the slot before it, so narrow blocks tell of wide ones; or towards a
    `known` survival of slots 1, 2, ..., which counts as 2 x NEIGHBOUR_TESTS tests. A request's offset has a Gaussian
    prior of mean 0. Steps are learnt from when survival is asked for: all that a request had since the last time are
    one Newton step on their likelihood.
    """

    def __init__(self, slots: int, known: Sequence[float] | None = None) -> None:
        self._counts = np.zeros((2, slots))  # tests and accepted ones
        self.offsets: dict[Hashable, Sequence[float]] = {}  # means, variances, and steps when learnt, by request
        self._ids: list[Hashable] = []  # the requests of `_drafts`
        self._drafts: list[tuple[Sequence[int], Sequence[int]]] = []  # widths, accepted; not learnt from yet
        self._step, self._learnt_at = 0, 0
        pairs, tests = zip([1.0, *(known or [])], known or [], strict=False), 2 * NEIGHBOUR_TESTS
        shares = [min(1.0, share / before) for before, share in pairs if before > 0][:slots]
        self._known = [(tests * share + 0.5) / (tests + 1) for share in shares]  # never 0 or 1

    def survival(self, request_ids: Sequence[Hashable], errors: Sequence[float] = (0.0,)) -> Floats:
        """[E, N, slots]: survival if the odds of all slots were so many standard errors better than known."""
        self._learn()
        odds, error = self._odds()
        better = odds + np.multiply.outer(errors, error)
        return np.asarray(_logistic(better[:, None] + self._offset(request_ids)[0]).cumprod(2))

    def overall(self) -> list[float]:
        """Survival of slots 1, 2, ... of a new request."""
        self._learn()
        return [float(share) for share in _logistic(self._odds()[0]).cumprod()]

    def observe(self, request_ids: Sequence[Hashable], widths: Sequence[int], accepted: Sequence[int]) -> None:
        """Takes a step: it tests slots up to the first rejection and none beyond the width."""
        self._step += 1
        if max(widths) == 1:
            return
        if self._ids != (ids := list(request_ids)):
            self._learn()
            self._ids = ids
        self._drafts.append((widths, accepted))

    def forget(self, request_id: Hashable) -> None:
        self._learn()
        self.offsets.pop(request_id, None)

    def _learn(self) -> None:
        keep, self._learnt_at = exp((self._learnt_at - self._step) / MEMORY), self._step
        self._counts *= keep
        if not self._drafts:
            return
        slot, (mean, variance) = np.arange(self._counts.shape[1]), self._offset(self._ids)
        widths, accepted = (np.array(each) for each in zip(*self._drafts, strict=True))  # [steps, N]
        tests = (slot < np.minimum(accepted + 1, widths - 1)[..., None]).sum(0)
        new = np.array([tests.sum(0), (slot < accepted[..., None]).sum((0, 1))])
        before = (1 - 1 / len(self._drafts)) / 2  # share of the new tests that was known before the average step
        self._counts += before * new
        chance = _logistic(self._odds()[0] + mean)
        self._counts += (1 - before) * new
        expected = tests * chance
        information = 1 / variance + (expected * (1 - chance)).sum(1, keepdims=True)
        mean = mean + (accepted.sum(0)[:, None] - expected.sum(1, keepdims=True)) / information
        learnt = np.hstack([mean, 1 / information, np.full_like(mean, self._step)]).tolist()
        self.offsets.update(zip(self._ids, learnt, strict=True))
        self._drafts = []

    def _odds(self) -> tuple[Floats, Floats]:
        """Log-odds of each slot's acceptance and their standard errors, as of an empirical logit; [slots] each."""
        odds, errors, weight, share = [], [], 1.0, PRIOR
        for slot, (tests, accepted) in enumerate(self._counts.T.tolist()):
            if slot < len(self._known):
                weight, share = 2 * NEIGHBOUR_TESTS, self._known[slot]
            good, total = accepted + weight * share, tests + weight
            share, bad = good / total, total - good
            odds.append(log(good / bad) if bad > 0 else inf)
            errors.append(sqrt(1 / (good + 0.5) + 1 / (bad + 0.5)))
            weight = min(NEIGHBOUR_TESTS, total)
        return np.array(odds), np.array(errors)

    def _offset(self, request_ids: Sequence[Hashable]) -> tuple[Floats, Floats]:
        """Means and variances of requests' offsets, [N, 1] each."""
        prior = OFFSET_SPREAD**2
        offsets = np.array([self.offsets.get(request_id, (0.0, prior, 0.0)) for request_id in request_ids])
        mean, variance, step = np.hsplit(offsets, 3)
        keep = np.exp((step - self._step) / MEMORY)
        return keep * mean, prior + keep**2 * (variance - prior)


class TimeEstimate:
    """A `CostModel` corrected by what served steps took.

    Corrections are Gaussian logarithms that return to their prior in the course of MEMORY steps: those of 1, 2, 4, ...
    rows (interpolated) without and with a draft, and the machine's speed, which all steps share. A step beyond SURPRISE
    standard deviations counts as one at that limit, and the speed becomes uncertain by as much as the step was off: if
    it has changed, the next steps say so at once; if not, they undo it. `learnt` is from an earlier run; without a
    covariance `measured` is a guess, SURPRISE times as uncertain. Nothing corrects what is `believed`.
    """

    def __init__(self, measured: CostModel, learnt: LearntCosts | None = None, *, believed: bool = False) -> None:
        self.measured, self._believed, self._noise, self._steps = measured, believed, NOISE, 0
        drafts, doublings = np.repeat([0, 1], NODES), np.tile(np.arange(NODES), 2)
        alike, near = drafts[:, None] == drafts, 0.5 ** np.abs(doublings[:, None] - doublings)
        spread = 0.0 if believed else SURPRISE * SPREAD if learnt and not learnt.covariance else SPREAD
        self._prior = np.diag([*[0.0] * 2 * NODES, spread**2])  # the machine's speed comes last
        self._prior[:-1, :-1] = spread**2 * alike * (1 + near)
        self._first = np.append(learnt.mean if learnt else np.zeros(2 * NODES), 0.0)
        self._mean, self._covariance = self._first.copy(), self._prior.copy()
        if learnt and learnt.covariance:
            self._covariance[:-1, :-1] = learnt.covariance

    @property
    def learnt(self) -> LearntCosts:
        """The corrections now, for the next run."""
        mean, covariance = (self._mean[:-1] + self._mean[-1]).round(6), self._covariance[:-1, :-1].round(8)
        return LearntCosts(mean=mean.tolist(), covariance=covariance.tolist())

    def of_steps(self, rows: Integers, drafted: Integers, context: Context = NO_CONTEXT) -> Floats:
        """Seconds of `CostModel.of_steps`, corrected."""
        doublings, nodes = np.log2(rows), np.arange(NODES)
        off, on = (np.interp(doublings, nodes, mean) for mean in (self._mean[:NODES], self._mean[NODES:-1]))
        correction = np.where(drafted > 0, on, off) + self._mean[-1]
        return np.asarray(self.measured.of_steps(rows, drafted, context) * np.exp(correction))

    def observe(self, rows: int, drafted: int, context: Context, seconds: float) -> None:
        if self._believed:
            return
        keep, weights = exp(-1 / MEMORY), _weights(rows, drafted)
        self._mean += (1 - keep) * (self._first - self._mean)
        self._covariance += (1 - keep**2) * (self._prior - self._covariance)
        error = log(seconds / self.measured.of_step(rows, drafted, context)) - float(weights @ self._mean)
        shared = self._covariance @ weights
        limit = SURPRISE * sqrt(float(weights @ shared) + self._noise**2)
        if abs(error) > limit:
            self._covariance[-1, -1] += error**2
            shared[-1] += error**2
        self._steps += 1  # a Gaussian's standard deviation is 1.25 mean deviations
        self._noise += max(1 / MEMORY, 1 / (self._steps + 1)) * (1.25 * min(abs(error), limit) - self._noise)
        unknown = float(weights @ shared)
        gain = shared / (unknown + max(self._noise**2, unknown * (abs(error) / limit - 1)))
        self._mean += gain * error
        self._covariance -= np.multiply.outer(gain, shared)

    def uncertainty(self, requests: int, rows: int) -> tuple[float, float]:
        """Standard error of log(time with a draft / time without), and the part that one step without would tell."""
        off = _weights(requests, 0)
        ratio, covered = _weights(rows, requests) - off, self._covariance @ off
        error = sqrt(max(0.0, float(ratio @ self._covariance @ ratio)))
        return error, abs(float(ratio @ covered)) / sqrt(float(off @ covered) + self._noise**2)


class Budget:
    """Steps that may be lost against no speculation (`balance`) and against the best known choice (`trials`)."""

    def __init__(self) -> None:
        self.balance, self.trials, self.has_drafted = START, TRIALS, False

    def refill(self) -> None:
        self.balance, self.trials = min(DEBT, self.balance + REFILL), min(TRIALS, self.trials + REFILL)

    def settle(self, gained: float, cost: float) -> None:
        """A step with a draft gained so many tokens for each request, and took so long."""
        self.balance, self.has_drafted = min(DEBT, self.balance + gained - cost), True

    def allowed(self, loss: Floats, rate: Floats) -> NDArray[np.bool_]:
        """Choices [M] that may be taken, by loss at worst and rate as known. An overdrawn budget asks for a gain."""
        if self.balance <= 0:
            return np.asarray(rate >= (rate[0] if self.balance >= -DEBT else np.inf))
        # The first draft of all may overdraw it: that of many requests tells as much as many drafts.
        return np.asarray(loss <= (max(1.0, self.balance) if self.has_drafted else DEBT))

    @property
    def for_trial(self) -> float:
        return max(0.0, min(self.balance, self.trials)) if self.has_drafted else DEBT


@dataclass(frozen=True)
class Forecast:
    """Expectations of M choices of widths, the first of which is off. A step without a draft is 1; [M] each."""

    choices: Choices
    seconds: Floats
    cost: Floats  # time of a step
    rate: Floats  # tokens of a request / cost; of off LEAST_GAIN more, which a draft must exceed
    hoped: Floats  # rate if acceptance is one standard error better than known; 0 of off
    loss: Floats  # cost - tokens, if it is one standard error worse


class AutoWidth:
    """The `WidthPolicy` of `width: auto`.

    Speculation pauses (`paused`) after PAUSE_AFTER tokens without a draft. If a draft would pay, but no request can be
    drafted for, it resumes and waits for other requests; N steps of waiting are followed by HOLD x N without.

    Args:
        cost: measured seconds; its draft cost must include everything that speculation adds to a step.
        block_size, allowed_widths: B, the widest width, and those that the engine can run (as for `choose_widths`).
        known_survival, believed, learnt: as for `AcceptanceEstimate` and `TimeEstimate`.
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
        self.acceptance = AcceptanceEstimate(block_size - 1, known_survival)
        self.times, self.budget = TimeEstimate(cost, learnt, believed=believed), Budget()
        self._cost_of: dict[tuple[int, int, int], float] = {}  # by requests, rows, drafted; as last decided
        self.expected_rate = 0.0
        """Tokens/s of one request that the coming step should bring by what is known; 0 before the first decision."""
        self._rates = (0.0, 0.0)  # expected of a step without a draft, and of the decision
        self._ids: list[Hashable] = []  # the decision: requests, widths, steps that it stands yet, a step's price
        self._widths: list[int] = []
        self._left, self._price, self._is_trial, self._narrow = 0, 0.0, False, False
        self._off_for, self._pause_after = 0, PAUSE_AFTER  # steps without a draft, and those before a pause
        self._waits, self._cooldown = False, 0  # for requests that can be drafted for; steps before the next wait

    @property
    def paused(self) -> bool:
        return self._off_for >= self._pause_after

    def widths(
        self, request_ids: Sequence[Hashable], context_tokens: int = 0, undraftable: Collection[Hashable] = ()
    ) -> list[int]:
        if not (ids := list(request_ids)):
            return []
        self._pause_after = max(2 * HOLD, PAUSE_AFTER // len(ids))
        self.budget.refill()
        if not self._stands(ids):
            self._decide(ids, undraftable, Context(context_tokens, len(ids)))
        self._left -= 1
        drafts = max(self._widths) > 1
        if drafts and len(undraftable) == len(ids):  # resume, and wait
            drafts, self._waits, self._off_for, self._left = False, True, 0, 0
        elif drafts:
            self.budget.trials -= self._price
            self._off_for = min(self._off_for, self._pause_after - HOLD) if self._is_trial else 0
        elif not self._waits:
            self._off_for += 1
        self._cooldown = self._cooldown + HOLD if self._waits else max(0, self._cooldown - self.paused)
        self._waits = self._waits and bool(undraftable)
        self.expected_rate = self._rates[drafts]
        return self._widths.copy() if drafts else [1] * len(ids)

    def observe(self, step: Step) -> None:
        if not step.widths:
            return
        requests, widths, accepted = len(step.widths), step.widths, step.accepted
        if min(accepted) < 0 or any(map(ge, accepted, widths)) or max(widths) > self.block_size:
            raise ValueError(f"accepted {accepted} of widths {widths}: need 0 <= accepted < width <= {self.block_size}")
        rows, drafted = sum(widths), requests - widths.count(1)
        if drafted:
            drafted = drafted if self.allowed_widths is None else requests
            if (kind := (requests, rows, drafted)) not in self._cost_of:
                off, on = self.times.of_steps(np.array([requests, rows]), np.array([0, drafted]), step.context)
                self._cost_of[kind] = float(on / off)
            self.budget.settle(1 + sum(accepted) / requests, self._cost_of[kind])
            if self.budget.balance < START:
                self._left = 0  # each draft is learnt from before the next one
        self.acceptance.observe(step.request_ids, widths, accepted)
        if step.seconds:
            self.times.observe(rows, drafted, step.context, step.seconds)

    def forget(self, request_id: Hashable) -> None:
        self.acceptance.forget(request_id)

    def _stands(self, ids: list[Hashable]) -> bool:
        """A draft is decided for its own requests alone; not to draft stands while most of them stay."""
        if self._left <= 0 or self._ids == ids:
            return self._left > 0
        return max(self._widths) == 1 and 2 * len(set(ids) & set(self._ids)) > max(len(ids), len(self._ids))

    def _decide(self, ids: list[Hashable], undraftable: Collection[Hashable], context: Context) -> None:
        """For requests that can be drafted for; where none can, as if all could: is it worth waiting for others?"""
        none_can, cools = len(undraftable) == len(ids), self.paused and self._cooldown > 0
        forecast = self._forecast(ids, () if none_can else undraftable, context)
        allowed = self.budget.allowed(forecast.loss, forecast.rate)
        allowed[1:] &= not (cools and none_can)
        best = int((forecast.rate * allowed).argmax())
        price = (1 - forecast.rate / forecast.rate[best]) * forecast.cost
        payable = allowed & (price <= (0.0 if cools else self.budget.for_trial))
        choice, self._is_trial = self._choose(forecast, best, payable)
        choices, requests = forecast.choices, len(ids)
        off = 1 / float(forecast.seconds[0])  # a step without a draft is 1 in `rate`
        self._rates = off, float(forecast.rate[choice]) * off if choice else off
        self._ids, self._widths, self._price = ids, choices.widths(choice).tolist(), max(0.0, float(price[choice]))
        self._cost_of = {(requests, sum(self._widths), int(choices.drafted[choice])): float(forecast.cost[choice])}
        most = HOLD if self.paused and not choice else min(HOLD, 1 + int(HOLD_SECONDS / forecast.seconds[choice]))
        self._left = 1 if self._is_trial else most

    def _forecast(self, ids: list[Hashable], undraftable: Collection[Hashable], context: Context) -> Forecast:
        survival = self.acceptance.survival(ids, (0.0, 1.0, -1.0))  # as known, and one standard error better and worse
        if undraftable:
            survival[:, [request_id in undraftable for request_id in ids]] = 0.0
        choices = choices_of(survival[0], self.allowed_widths)
        seconds = self.times.of_steps(choices.rows, choices.drafted, context)
        cost, (known, better, worse) = seconds / seconds[0], choices.tokens(survival) / len(ids)
        rate, hoped = known / cost, better / cost
        rate[0], hoped[0] = 1 + LEAST_GAIN, 0.0
        return Forecast(choices, seconds, cost, rate, hoped, cost - worse)

    def _choose(self, forecast: Forecast, best: int, payable: NDArray[np.bool_]) -> tuple[int, bool]:
        """The best choice, a narrower one as fast, or a wider one that may be faster; True where it is a trial."""
        rate, hoped, choices = forecast.rate, forecast.hoped, forecast.choices
        wish = int(hoped.argmax())
        error, settled = self.times.uncertainty(choices.requests, int(choices.rows[best or wish]))
        self._narrow = not self._narrow
        # Off (choice 0) is left for anything that is payable.
        payable = payable & (rate >= (1 - REFILL) * rate[best] * (best > 0))
        if best and self._narrow:
            if log(rate[best] / rate[0]) < settled:
                return 0, True
            return 1 + int(np.argmax(payable[1:])), False
        if best or hoped[wish] * exp(error) > rate[0]:  # times may be better than known, too
            wider = best + 1 + np.flatnonzero(payable[best + 1 : wish + 1])
            if len(wider):
                return int(wider[-1]), not best
        return best, False


def _logistic(odds: Floats) -> Floats:
    return np.asarray((1 + np.tanh(odds / 2)) / 2)


def _weights(rows: int, drafted: int) -> Floats:
    """[2 * NODES + 1]: the weight of each correction in that of a step."""
    weights, doublings = np.zeros(2 * NODES + 1), min(log(max(rows, 1), 2), NODES - 1.0)
    left = min(int(doublings), NODES - 2)
    at = left + NODES * (drafted > 0)
    weights[at], weights[at + 1], weights[-1] = left + 1 - doublings, doublings - left, 1.0
    return weights
