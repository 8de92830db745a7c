"""What finding out may cost: the account of a conservative bandit (Wu et al. 2016) whose baseline is speculation off.

All amounts are in steps without speculation.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from dflash_serve.speculation.belief import Vector

START: Final = 2.5
"""What may be lost on finding out to begin with."""
TRUST: Final = 4.0
"""The same with a drafter whose survival is known from elsewhere: a bad beginning may well be bad luck."""
CREDIT: Final = 20.0
"""The most that the account holds: what was gained may be lost again."""
DEBT: Final = 6.0
"""How far bad luck may take the account below nothing."""
REFILL: Final = 0.002
"""What every step adds: the share of all time that may go into finding out for ever."""
FORGIVEN: Final = 0.005
"""The same while the account is below nothing: what bad luck took away is tried again in time."""
SURE: Final = 0.6
"""What a draft must promise over off, as a share, when the account is DEBT below nothing; before, less."""
RISK: Final = 1.0
"""What one step may lose at worst while there is less than that on the account."""
FIRST: Final = 1 / 16
"""The same of the very first draft, for each of its requests, TRUST at most: that of many tells as much as many do."""
CURIOSITY: Final = 0.75
"""What trials of what is not the best may cost together at once."""
WONDER: Final = 0.003
"""What every step adds to that: the share of all time that goes into them."""
TRIFLE: Final = 0.001
"""A price that needs no account."""


class Account:
    """What may be lost on drafts, and what may be spent on trials of what is not the best.

    Every step pays in REFILL, or FORGIVEN while something is owed; every step with a draft pays in the tokens it gained
    per request, less its time. With nothing on the account only what promises to gain is drafted, and the more is owed
    the more it must promise; below -DEBT nothing is. What trials cost beside the best that is known is limited once
    more, by CURIOSITY: where costs scatter, they may be hoped to stand better for ever.

    Args:
        trusted: something is known of the drafter.
    """

    def __init__(self, *, trusted: bool) -> None:
        self.balance = TRUST if trusted else START
        self.curiosity = CURIOSITY
        self.has_drafted = False

    @property
    def is_comfortable(self) -> bool:
        """So much is on it that a few drafts more or less do not matter."""
        return self.balance >= TRUST

    def refill(self) -> None:
        """A step begins."""
        self.balance = min(CREDIT, self.balance + (REFILL if self.balance > 0 else FORGIVEN))
        self.curiosity = min(CURIOSITY, self.curiosity + WONDER)

    def settle(self, gained: float, cost: float) -> None:
        """A step with a draft gained so many tokens per request, and took so long."""
        self.has_drafted = True
        self.balance = min(CREDIT, self.balance + gained - cost)

    def payable(self, loss: Vector, rate: Vector, requests: int) -> NDArray[np.bool_]:
        """Which choices may be taken, [M]; the first of them is off.

        Args:
            loss: [M] of a step at worst.
            rate: [M] tokens per second, as known.
        """
        if self.balance < -DEBT:
            return np.asarray(np.arange(len(loss)) == 0, dtype=np.bool_)
        if self.balance <= 0:
            return np.asarray(rate >= rate[0] * (1 - SURE * self.balance / DEBT), dtype=np.bool_)
        return np.asarray(loss <= max(RISK, self.balance, self._first(requests)), dtype=np.bool_)

    def funds(self, requests: int) -> float:
        """What a trial may cost beside the best."""
        return max(TRIFLE, min(self.balance, self.curiosity), self._first(requests))

    def _first(self, requests: int) -> float:
        return 0.0 if self.has_drafted else min(TRUST, FIRST * requests)
