"""How far a block will be accepted: the survival of its slots, learnt from every step that verified drafted tokens.

Whether slot k of a request's block is accepted, given that the slots before it were, is thought of as a Rasch model:

    P(slot k accepted | slots < k accepted) = logistic(ease_k + opening x nearness + mood)

`ease` [B-1] belongs to the drafter and this server: one `Belief`, in which neighbouring slots are held together, so
that narrow widths tell of wide ones. The prior is what is known of the drafter, or optimistic. `opening`, of the same
belief, is by how much an answer is easier where it begins ("Sure, here is..."): nearness is 1 at its first token and
soon 0. `mood` belongs to the request and the text that it is in; it stays for a while and then changes. What is known
of it is a distribution over seven values, kept up by the forward recursion of a hidden Markov model; how moods spread
is learnt over all requests.

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
OPENING_SPREAD: Final = 1.0
"""How much easier or harder answers may well be where they begin."""
NEARNESS: Final[Vector] = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
OPENING_LASTS: Final = 5
"""Tokens of an answer after which nearness to its beginning is 1/e; it is rounded to the values above."""
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
        covariance = np.diag([*[0.0] * slots, OPENING_SPREAD**2])
        covariance[:-1, :-1] = spread**2 + SLOT_SPREAD**2 * np.minimum(order[:, None], order[None, :])
        self._ease = Belief(np.append(_logits(known, slots), 0.0), covariance, EASE_MEMORY)
        """Ease of slots, and the opening: B numbers."""
        spread_of_moods = np.exp(-0.5 * (MOODS / MOOD_SPREAD) ** 2)
        self._first_moods: Vector = spread_of_moods / spread_of_moods.sum()
        self._moods = self._first_moods.copy()
        self._rows: dict[Hashable, int] = {}
        self._free = [0]
        self._beliefs: Matrix = self._moods[None, :].copy()
        self._written: Integers = np.zeros(1, np.int64)
        """Tokens of each request's answer before the coming step."""
        self._batch: tuple[list[Hashable], Integers] | None = None
        """The last step's requests and their rows: mostly the next step's, too."""

    def __len__(self) -> int:
        """Requests that are known."""
        return len(self._rows)

    def survival(self, request_ids: Sequence[Hashable]) -> Matrix:
        """P(slot k is accepted) of each request: [N, B-1]."""
        return np.asarray(self._bounds(request_ids, AS_KNOWN)[0])

    def bounds(self, request_ids: Sequence[Hashable]) -> tuple[Matrix, Matrix, Matrix]:
        """The same, and were all slots as hard and as easy as may well be: [N, B-1] each."""
        known, feared, hoped = self._bounds(request_ids, CASES)
        return known, feared, hoped

    def overall(self) -> list[float]:
        """Survival of slots 1..B-1 of a request of which nothing is known yet."""
        return [float(share) for share in self._moods @ self._acceptance()[1][0, 0]]

    def observe(self, request_ids: Sequence[Hashable], widths: Integers, accepted: Integers) -> None:
        """Learns from a step, or from some of the same requests at once, which takes hardly longer.

        Args:
            widths, accepted: [N] or [steps, N]: slots verified, and drafted tokens accepted, less than the width.
        """
        widths, accepted = np.atleast_2d(widths), np.atleast_2d(accepted)
        rows = self._index(request_ids)
        written = self._written[rows] + np.cumsum(1 + accepted, axis=0) - (1 + accepted)
        self.pass_by(len(widths))
        self._written[rows] += accepted.sum(0)
        drafted = (widths > 1).any(0)
        if drafted.any():
            rows, near = rows[drafted], _nearness(written[:, drafted])
            self._beliefs[rows] = self._judge(self._beliefs[rows], near, widths[:, drafted], accepted[:, drafted])

    def pass_by(self, steps: int) -> None:
        """Steps go by: what is known gets older, and answers longer."""
        self._ease.drift(steps)
        self._written += steps
        self._beliefs = self._moods + (self._beliefs - self._moods) * (1 - 1 / MOOD_LASTS) ** steps

    def forget(self, request_id: Hashable) -> None:
        """The request has ended."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)
            self._batch = None

    def _bounds(self, request_ids: Sequence[Hashable], optimism: Vector) -> Matrix:
        """Survival [C, N, B-1] in each case, by what is known of requests' moods."""
        rows = self._index(request_ids)  # may make room for new ones
        near, beliefs = _nearness(self._written[rows]), self._beliefs[rows]
        survival = self._acceptance(optimism)[1]
        found = beliefs @ survival[:, 0]
        for nearness in np.unique(near[near > 0]):
            found[:, near == nearness] = beliefs[near == nearness] @ survival[:, nearness]
        return np.asarray(found)

    def _judge(self, beliefs: Matrix, near: Integers, widths: Integers, accepted: Integers) -> Matrix:
        """What requests' moods are after steps; the ease of slots and the spread of moods learn on the way.

        Args:
            near: [steps, N], which `NEARNESS`.
        """
        conditional, survival = (each[0] for each in self._acceptance())
        one = np.ones((len(NEARNESS), len(MOODS), 1))
        reached = np.concatenate([one, survival], axis=2)[near, :, accepted]
        stopped = np.concatenate([1 - conditional, one], axis=2)[near, :, np.minimum(accepted, self.slots)]
        beliefs = beliefs * (reached * np.where((accepted < widths - 1)[..., None], stopped, 1.0)).prod(0)
        beliefs /= beliefs.sum(1, keepdims=True)
        self._learn_ease(beliefs, conditional, near, widths, accepted)
        share = widths.size / (widths.size + MOOD_PRIOR)
        self._moods = self._moods + share * (beliefs.mean(0) - self._moods + 0.002 * (self._first_moods - self._moods))
        return beliefs

    def _learn_ease(
        self, beliefs: Matrix, conditional: Matrix, near: Integers, widths: Integers, accepted: Integers
    ) -> None:
        slot, accepted = np.arange(self.slots), accepted[..., None]
        tested = slot < np.minimum(accepted + 1, widths[..., None] - 1)  # [steps, N, B-1]
        requests, nearness = np.arange(len(beliefs)), NEARNESS[near][..., None]
        expected = (beliefs @ conditional)[near, requests]
        variance = (beliefs @ (conditional * (1 - conditional)))[near, requests] * tested
        surprise, steps = ((slot < accepted) - expected) * tested, (0, 1)
        shared = (variance * nearness).sum(steps)
        information = np.diag(np.append(variance.sum(steps), (variance * nearness**2).sum()))
        information[-1, :-1] = information[:-1, -1] = shared
        self._ease.learn(information, np.append(surprise.sum(steps), (surprise * nearness).sum()))
        np.clip(self._ease.mean, -LIMIT, LIMIT, out=self._ease.mean)

    def _acceptance(self, optimism: Vector = AS_KNOWN) -> tuple[Matrix, Matrix]:
        """By case, nearness, mood and slot: conditional acceptance and survival, both [C, 5, moods, B-1].

        Args:
            optimism: [C], in standard deviations of the ease of slots.
        """
        near, both = NEARNESS[:, None], self._ease.covariance
        variance = np.diagonal(both)[:-1] + 2 * near * both[-1, :-1] + near**2 * both[-1, -1]
        mean, spread = self._ease.mean[:-1] + near * self._ease.mean[-1], np.sqrt(np.maximum(variance, 0))
        ease = mean + optimism[:, None, None] * spread
        conditional = 1 / (1 + np.exp(-(ease[:, :, None, :] + MOODS[:, None])))
        return conditional, np.asarray(np.cumprod(conditional, axis=3), dtype=np.float64)

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
            self._written = np.concatenate([self._written, np.zeros_like(self._written)])
            self._free = list(range(2 * known - 1, known - 1, -1))
        row = self._free.pop()
        self._rows[request_id], self._beliefs[row], self._written[row] = row, self._moods, 0
        return row


def _nearness(written: Integers) -> Integers:
    """Which `NEARNESS` answers of so many tokens have, whatever the shape."""
    return np.asarray(np.rint(np.exp(-written / OPENING_LASTS) * (len(NEARNESS) - 1)), dtype=np.int64)


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
