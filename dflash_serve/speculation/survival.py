"""How far a block will be accepted: the survival of its slots, learnt from every step that verified drafted tokens.

Whether slot k of a request's block is accepted, given that the slots before it were, is thought of as a Rasch model:

    P(slot k accepted | slots < k accepted) = logistic(ease_k + mood)

`ease` [B-1] belongs to the drafter and this server: one `Belief`, in which neighbouring slots are held together, so
that narrow widths tell of wide ones. The prior is what is known of the drafter, or optimistic. `mood` belongs to the
request and the text that it is in; it stays for a while and then changes. What is known of it is a distribution over
seven values, kept up by the forward recursion of a hidden Markov model; how moods spread is learnt over all requests.

A step of width w that accepted a tokens tells of slots 1..min(a+1, w-1) only: the slots after a rejection and those
beyond the width were never put to the test.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

import numpy as np

from dflash_serve.speculation.belief import Belief, Integers, Matrix, Vector

OPTIMISTIC: Final = 0.73
"""The conditional acceptance of a slot of a drafter of which nothing is known."""
EASE_SPREAD: Final = 2.0
"""How far an unknown drafter's ease may lie from the prior (standard deviation, in logits)."""
KNOWN_SPREAD: Final = 0.7
"""The same where its survival is known from elsewhere."""
SLOT_SPREAD: Final = 0.3
"""How much the ease of a slot differs from that of the slot before it."""
MOODS: Final[Vector] = np.array([-2.25, -1.5, -0.75, 0.0, 0.75, 1.5, 2.25])
MOOD_SPREAD: Final = 0.6
MOOD_LASTS: Final = 96
"""Steps after which a request's mood is likely to have changed."""
MOOD_PRIOR: Final = 100
"""Steps of requests after which the spread of moods is learnt rather than assumed."""
EASE_MEMORY: Final = 2800
"""Steps that the ease of the slots is remembered for: long, for what a text does to it is for moods to follow."""
FEAR, HOPE = 1.0, 1.5
"""How far the ease of slots may well be from what is known, to either side, in standard deviations."""
AS_KNOWN: Final[Vector] = np.zeros(1)
CASES: Final[Vector] = np.array([0.0, -FEAR, HOPE])
LIMIT: Final = 6.0
"""Ease stays within +-LIMIT: beyond, a slot that was never right could hardly be learnt to be good."""


class SurvivalEstimate:
    """Survival of slots 1..slots of every request.

    Args:
        slots: B - 1.
        known: survival of slots 1.. from elsewhere (training, the last run); None = nothing is known.
    """

    def __init__(self, slots: int, known: Sequence[float] | None = None) -> None:
        self.slots = slots
        order = np.arange(slots)
        spread = EASE_SPREAD if known is None else KNOWN_SPREAD
        covariance = spread**2 + SLOT_SPREAD**2 * np.minimum(order[:, None], order[None, :])
        self._ease = Belief(_logits(known, slots), covariance, EASE_MEMORY)
        spread_of_moods = np.exp(-0.5 * (MOODS / MOOD_SPREAD) ** 2)
        self._first_moods: Vector = spread_of_moods / spread_of_moods.sum()
        self._moods = self._first_moods.copy()
        self._rows: dict[Hashable, int] = {}
        self._free = [0]
        self._beliefs: Matrix = self._moods[None, :].copy()
        self._batch: tuple[list[Hashable], Integers] | None = None
        """The last step's requests and their rows: mostly the next step's, too."""

    def __len__(self) -> int:
        """Requests that are known."""
        return len(self._rows)

    def survival(self, request_ids: Sequence[Hashable]) -> Matrix:
        """P(slot k is accepted) of each request: [N, B-1]."""
        return np.asarray(self._of(request_ids) @ self._acceptance()[1][0])

    def bounds(self, request_ids: Sequence[Hashable]) -> tuple[Matrix, Matrix, Matrix]:
        """The same, and were all slots as hard and as easy as may well be: [N, B-1] each."""
        known, feared, hoped = self._of(request_ids) @ self._acceptance(CASES)[1]
        return known, feared, hoped

    def overall(self) -> list[float]:
        """Survival of slots 1..B-1 of a request of which nothing is known yet."""
        return [float(share) for share in self._moods @ self._acceptance()[1][0]]

    def observe(self, request_ids: Sequence[Hashable], widths: Integers, accepted: Integers) -> None:
        """Learns from a step, or from some of the same requests at once, which takes hardly longer.

        Args:
            widths, accepted: [N] or [steps, N]: slots verified, and drafted tokens accepted, less than the width.
        """
        widths, accepted = np.atleast_2d(widths), np.atleast_2d(accepted)
        rows = self._index(request_ids)
        self.pass_by(len(widths))
        drafted = (widths > 1).any(0)
        if drafted.any():
            rows = rows[drafted]
            self._beliefs[rows] = self._judge(self._beliefs[rows], widths[:, drafted], accepted[:, drafted])

    def pass_by(self, steps: int) -> None:
        """Steps go by: what is known gets older."""
        self._ease.drift(steps)
        self._beliefs = self._moods + (self._beliefs - self._moods) * (1 - 1 / MOOD_LASTS) ** steps

    def forget(self, request_id: Hashable) -> None:
        """The request has ended."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)
            self._batch = None

    def _judge(self, beliefs: Matrix, widths: Integers, accepted: Integers) -> Matrix:
        """What requests' moods are after steps; the ease of slots and the spread of moods learn on the way."""
        conditional, survival = (each[0] for each in self._acceptance())
        one = np.ones((len(MOODS), 1))
        reached = np.concatenate([one, survival], axis=1)[:, accepted]
        stopped = np.concatenate([1 - conditional, one], axis=1)[:, np.minimum(accepted, self.slots)]
        likelihood = (reached * np.where(accepted < widths - 1, stopped, 1.0)).prod(1)
        beliefs = beliefs * likelihood.T
        beliefs /= beliefs.sum(1, keepdims=True)
        self._learn_ease(beliefs, conditional, widths, accepted)
        share = widths.size / (widths.size + MOOD_PRIOR)
        self._moods = self._moods + share * (beliefs.mean(0) - self._moods + 0.002 * (self._first_moods - self._moods))
        return beliefs

    def _learn_ease(self, beliefs: Matrix, conditional: Matrix, widths: Integers, accepted: Integers) -> None:
        slot, accepted = np.arange(self.slots), accepted[..., None]
        tested = slot < np.minimum(accepted + 1, widths[..., None] - 1)  # [steps, N, B-1]
        expected, variance = beliefs @ conditional, beliefs @ (conditional * (1 - conditional))
        gradient = (((slot < accepted) - expected) * tested).sum((0, 1))
        self._ease.learn(np.diag((variance * tested).sum((0, 1))), gradient)
        np.clip(self._ease.mean, -LIMIT, LIMIT, out=self._ease.mean)

    def _acceptance(self, optimism: Vector = AS_KNOWN) -> tuple[Matrix, Matrix]:
        """By case, mood and slot: conditional acceptance and survival, both [C, moods, B-1].

        Args:
            optimism: [C], in standard deviations of the ease of slots.
        """
        ease = self._ease.mean + optimism[:, None] * self._ease.spread
        conditional = 1 / (1 + np.exp(-(ease[:, None, :] + MOODS[:, None])))
        return conditional, np.asarray(np.cumprod(conditional, axis=2), dtype=np.float64)

    def _of(self, request_ids: Sequence[Hashable]) -> Matrix:
        """What is known of requests' moods: [N, moods]."""
        rows = self._index(request_ids)  # may make room for new ones
        return self._beliefs[rows]

    def _index(self, request_ids: Sequence[Hashable]) -> Integers:
        """Rows of requests; new ones get one."""
        if self._batch is None or self._batch[0] != request_ids:
            rows = [row if (row := self._rows.get(each)) is not None else self._new(each) for each in request_ids]
            self._batch = list(request_ids), np.array(rows, dtype=np.int64)
        return self._batch[1]

    def _new(self, request_id: Hashable) -> int:
        if not self._free:
            known = len(self._beliefs)
            self._beliefs = np.concatenate([self._beliefs, np.empty_like(self._beliefs)])
            self._free = list(range(2 * known - 1, known - 1, -1))
        row = self._free.pop()
        self._rows[request_id], self._beliefs[row] = row, self._moods
        return row


def _logits(known: Sequence[float] | None, slots: int) -> Vector:
    """Ease [slots] of a survival; a slot of which nothing is known is as easy as the one before it."""
    conditional: list[float] = []
    for slot in range(slots):
        before = 1.0 if slot == 0 else known[slot - 1] if known and slot <= len(known) else 0.0
        if known and slot < len(known) and before > 0:
            conditional.append(min(0.98, max(0.02, known[slot] / before)))
        else:
            conditional.append(conditional[-1] if conditional else OPTIMISTIC)
    share = np.array(conditional)
    return np.asarray(np.log(share / (1 - share)))
