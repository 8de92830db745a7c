"""Which slot a new request gets, and how much of its prompt the stores hold already.

A slot keeps what its last sequence left in it until the slot is given away again, so a prompt that begins like an
earlier one (a system prompt, the next turn of a conversation) starts behind the common part. Target and drafter are
reused together: a prefix without the drafter's context would cost acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from .sequence import Seat, Sequence


class Slots:
    """Free and taken slots, and the sequence that each holds the K/V of."""

    def __init__(self, count: int, *, reuse: bool = True) -> None:
        self.free = list(range(count))
        """The longest unused first."""
        self.reuse = reuse
        self.holds: dict[int, Sequence] = {}

    def take(self, prompt: Many[int], salt: str) -> Seat:
        """A free slot for a prompt; only sequences of the same salt lend their prefix. There must be a free slot."""
        donor, reused = self._best_donor(prompt, salt)
        others = [slot for slot in self.free if donor is None or slot != donor.slot]
        slot = others[0] if others else self.free[0]
        # In place where the donor is over and mostly shared: nothing to copy, and little is lost.
        if donor is not None and donor.slot in self.free and 2 * reused >= _held(donor):
            slot = donor.slot
        self.free.remove(slot)
        self.holds.pop(slot, None)
        return Seat(slot, donor, reused)

    def give(self, sequence: Sequence) -> None:
        """From now on the sequence's slot is its own, and what it holds can be lent."""
        if self.reuse:
            self.holds[sequence.slot] = sequence

    def release(self, sequence: Sequence, *, keep: bool) -> None:
        """Frees the slot; `keep` = its contents are sound and may still be lent."""
        self.free.append(sequence.slot)
        if not keep:
            self.holds.pop(sequence.slot, None)

    def _best_donor(self, prompt: Many[int], salt: str) -> tuple[Sequence | None, int]:
        """Who shares the longest prefix. The prompt's last token is always computed: its row gives the first token."""
        wanted, best, longest = list(prompt[:-1]), None, 0
        for sequence in self.holds.values():
            if sequence.salt == salt:
                shared = common_length(wanted, sequence.token_ids[: _held(sequence)])
                if shared > longest:
                    best, longest = sequence, shared
        return best, longest


def _held(sequence: Sequence) -> int:
    """Leading tokens of a sequence whose K/V is in the store; a stop may have cut its tokens behind verified ones."""
    return min(sequence.verified, len(sequence.token_ids))


def common_length(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix, by bisection: slices are compared at C's speed."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
