"""How likely each slot is accepted, learnt from censored observations."""

from collections.abc import Sequence
from typing import Final

UNINFORMED: Final = 0.5  # the conditional acceptance of slot 1 before anything was seen, worth one observation


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
