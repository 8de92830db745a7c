"""The width policy as it was (commit 5706b86), for `benchmarks/policy.py` to set the new one beside it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import Final

from dflash_serve.speculation.costs import CostModel
from dflash_serve.speculation.policy import Step

UNINFORMED: Final = 0.5


class SurvivalEstimate:
    """Survival of slots 1..B-1, from an exponentially weighted memory of what was observed.

    A step of width w that accepted a tokens says something about slots 1..min(a+1, w-1) only: the slots after a
    rejection and those beyond the width were never put to the test. So the estimate is of the conditional acceptance
    h_k = P(slot k accepted | slots < k accepted), for which each test is a plain success or failure, and
    survival_k = h_1 ... h_k. Tests of slot k are weighted by (1 - 1/memory) per later test of the same slot.

    h_k is the mean of a Beta posterior, (successes + strength x prior_k) / (tests + strength). The prior of a request
    is its batch's estimate; the prior of the batch's own slot k is its slot k-1 (with a strength of one test), so that
    narrow widths inform wide ones: a slot never tested is thought to be like the one before it.
    """

    def __init__(self, slots: int, *, memory: float, strength: float) -> None:
        self._keep = 1 - 1 / memory
        self._strength = strength
        self._tests = [0.0] * slots
        self._successes = [0.0] * slots

    def observe(self, width: int, accepted: int) -> None:
        """Learn from a step that verified `width` slots and accepted `accepted` drafted tokens."""
        for slot in range(min(accepted + 1, width - 1)):
            self._tests[slot] = self._keep * self._tests[slot] + 1
            self._successes[slot] = self._keep * self._successes[slot] + (slot < accepted)

    def conditional(self, prior: Sequence[float] | None = None) -> list[float]:
        """h_1..h_{B-1}, shrunk toward `prior` (h of the batch), or each slot toward the one before it."""
        result: list[float] = []
        for slot, (tests, successes) in enumerate(zip(self._tests, self._successes, strict=True)):
            toward, strength = (prior[slot], self._strength) if prior else (result[-1] if result else UNINFORMED, 1.0)
            result.append((successes + strength * toward) / (tests + strength))
        return result


def survival_of(conditional: Sequence[float]) -> list[float]:
    """Running products: survival_k = h_1 ... h_k."""
    result, product = [], 1.0
    for acceptance in conditional:
        product *= acceptance
        result.append(product)
    return result


@dataclass
class _Request:
    estimate: SurvivalEstimate
    last_full_block: float = -inf  # the step in which it was last offered a full block


@dataclass
class AutoWidthBefore:
    """The widths that the cost model and the observed survival make fastest, with probes so as not to go stale.

    A probe offers one request a full block (with `allowed_widths`: the batch the widest one), because slots that are
    not offered are not learnt about. It comes every `probe_interval` steps, to the request whose last full block is
    the oldest, and not at all while even a perfect drafter would not pay. If a probe costs (1 + c) times the step it
    replaces, probing costs at most c / probe_interval of all time; where that exceeds `probe_budget` the interval is
    stretched to c / probe_budget. The first `learning_probes` come at once, so that a good drafter is not left waiting.
    So by the measured costs, with a drafter that is never right, `auto` takes longer than `off` by a share of at most
    `probe_budget`, and once by the steps in which that is found out.

    Args:
        cost: measured seconds; its draft cost must include everything that speculation adds to a step.
        block_size: B, the widest width.
        allowed_widths: as for `choose_widths`.
        request_memory, batch_memory: how many tests of a slot are remembered, roughly.
        prior_strength: how many tests of a request's own the batch's estimate is worth.
    """

    cost: CostModel
    block_size: int
    allowed_widths: Sequence[int] | None = None
    probe_interval: int = 32
    probe_budget: float = 0.02
    learning_probes: int = 8
    request_memory: float = 32
    batch_memory: float = 512
    prior_strength: float = 8
    _requests: dict[Hashable, _Request] = field(default_factory=dict, init=False)
    _batch: SurvivalEstimate = field(init=False)
    _step: int = field(default=0, init=False)
    _last_probe: int = field(default=0, init=False)
    _probes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.block_size < 2 or self.probe_interval < 1 or not self.probe_budget > 0:
            raise ValueError("AutoWidth: need block_size >= 2, probe_interval >= 1 and probe_budget > 0")
        if self.allowed_widths is not None and not all(1 <= w <= self.block_size for w in self.allowed_widths):
            raise ValueError(f"allowed_widths {list(self.allowed_widths)}: use widths from 1 to {self.block_size}")
        self._batch = self._new_estimate(self.batch_memory)

    resting = False

    def widths(
        self, request_ids: Sequence[Hashable], context_tokens: int = 0, undraftable: Collection[Hashable] = ()
    ) -> list[int]:
        requests = [self._request(request_id) for request_id in request_ids]
        prior = self._batch.conditional()
        survivals = [survival_of(request.estimate.conditional(prior)) for request in requests]
        widths = self._probed(self._best(survivals), requests)
        for request, width in zip(requests, widths, strict=True):
            if width == self._widest:
                request.last_full_block = self._step
        self._step += 1
        return widths

    def observe(self, step: Step) -> None:
        for request_id, width, accepted in zip(step.request_ids, step.widths, step.accepted, strict=True):
            self._request(request_id).estimate.observe(width, accepted)
            self._batch.observe(width, accepted)

    def forget(self, request_id: Hashable) -> None:
        self._requests.pop(request_id, None)

    @property
    def _widest(self) -> int:
        return self.block_size if self.allowed_widths is None else max(self.allowed_widths, default=1)

    def _best(self, survivals: Sequence[Sequence[float]]) -> list[int]:
        return choose_widths(survivals, self.cost, max_width=self._widest, allowed_widths=self.allowed_widths)

    def _probed(self, widths: list[int], requests: Sequence[_Request]) -> list[int]:
        """The widths, or a probe in their place if one is due and may teach something."""
        waited, learning = self._step - self._last_probe, self._probes < self.learning_probes
        if not (learning or waited >= self.probe_interval) or min(widths, default=self._widest) >= self._widest:
            return widths
        probe = [self._widest] * len(widths)
        if self.allowed_widths is None:
            oldest = min(range(len(widths)), key=lambda i: requests[i].last_full_block)
            probe = [self._widest if i == oldest else width for i, width in enumerate(widths)]
        extra = self.cost.step_seconds(probe) / self.cost.step_seconds(widths) - 1
        if not (learning or extra <= self.probe_budget * waited) or not self._could_pay(len(widths)):
            return widths
        self._last_probe, self._probes = self._step, self._probes + 1
        return probe

    def _could_pay(self, n: int) -> bool:
        return max(self._best([[1.0] * (self._widest - 1)] * n)) > 1

    def _request(self, request_id: Hashable) -> _Request:
        if request_id not in self._requests:
            self._requests[request_id] = _Request(self._new_estimate(self.request_memory))
        return self._requests[request_id]

    def _new_estimate(self, memory: float) -> SurvivalEstimate:
        return SurvivalEstimate(self.block_size - 1, memory=memory, strength=self.prior_strength)


def choose_widths(
    survivals: Sequence[Sequence[float]],
    cost: CostModel,
    *,
    max_width: int,
    allowed_widths: Sequence[int] | None = None,
) -> list[int]:
    """Chooses each request's width in 1..max_width so that expected tokens per second are highest.

    Args:
        survivals: per request, P(slot k is accepted) for k = 1, 2, ...; one that is shorter than max_width - 1 caps
            that request's width at its length + 1. A rise (rounding) is read as level.
        cost: measured seconds.
        max_width: the block size B, or less.
        allowed_widths: the widths that the engine can run (CUDA graphs); all requests then share one of them, cut to
            a request's own cap only for counting tokens. Width 1 is always allowed.

    Returns:
        One width per request; all 1 means: do not draft. Among equals, the fewest rows.
    """
    capped = [list(accumulate(survival[: max_width - 1], min)) for survival in survivals]
    if allowed_widths is not None:
        return _shared_width(capped, cost, [width for width in allowed_widths if 1 < width <= max_width])
    # Python's sort is stable and slots come in order, which is the tie rule that the proof asks for.
    gains = sorted(((gain, i) for i, survival in enumerate(capped) for gain in survival), key=lambda g: -g[0])
    n = len(capped)
    best_rate, best_rows, tokens = _rate_when_off(n, cost), 0, float(n)
    draft_seconds = cost.draft_seconds(n) if n else 0.0
    for rows, (gain, _) in enumerate(gains, start=1):
        tokens += gain
        rate = tokens / (draft_seconds + cost.target_seconds(n + rows))
        if rate > best_rate:
            best_rate, best_rows = rate, rows
    widths = [1] * n
    for _, i in gains[:best_rows]:
        widths[i] += 1
    return widths


def _shared_width(survivals: Sequence[Sequence[float]], cost: CostModel, allowed: Sequence[int]) -> list[int]:
    n = len(survivals)
    best_rate, best_width = _rate_when_off(n, cost), 1
    for width in sorted(allowed):
        tokens = n + sum(sum(survival[: width - 1]) for survival in survivals)
        rate = tokens / cost.step_seconds([width] * n) if n else 0.0
        if rate > best_rate:
            best_rate, best_width = rate, width
    return [best_width] * n


def _rate_when_off(n: int, cost: CostModel) -> float:
    return n / cost.target_seconds(n) if n else 0.0
