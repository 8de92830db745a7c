"""Which entry a new request gets, and how much of its prompt the K/V caches hold already.

An entry keeps what its last request left in it until the entry is given away again, so a prompt that begins like an
earlier one (a system prompt, the next turn of a conversation) starts behind the common part. Target and drafter are
reused together: a prefix without the drafter's context would cost acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence

from .request import Allocation, Request


class KVCacheManager:
    """Free and taken entries, and the request that each holds the K/V of."""

    def __init__(self, count: int, *, reuse: bool = True) -> None:
        self.free = list(range(count))
        """The longest unused first."""
        self.reuse = reuse
        self.holds: dict[int, Request] = {}

    def allocate(self, prompt: Sequence[int], salt: str) -> Allocation:
        """Takes a free entry for a prompt; only requests of the same salt lend their prefix. One must be free."""
        donor, reused = self._best_donor(prompt, salt)
        others = [entry for entry in self.free if donor is None or entry != donor.entry]
        entry = others[0] if others else self.free[0]
        # In place where the donor is over and mostly shared: nothing to copy, and little is lost.
        if donor is not None and donor.entry in self.free and 2 * reused >= _held(donor):
            entry = donor.entry
        self.free.remove(entry)
        self.holds.pop(entry, None)
        return Allocation(entry, donor, reused)

    def assign(self, request: Request) -> None:
        """Notes that the request has its entry, so that what it holds can be lent."""
        if self.reuse:
            self.holds[request.entry] = request

    def release(self, request: Request, *, keep: bool) -> None:
        """Frees the entry; `keep` = its contents are sound and may still be lent."""
        self.free.append(request.entry)
        if not keep:
            self.holds.pop(request.entry, None)

    def _best_donor(self, prompt: Sequence[int], salt: str) -> tuple[Request | None, int]:
        """The request that shares the longest prefix, and the prefix's length.

        The prompt's last token is always computed: its row gives the first token of the answer.
        """
        wanted, best, longest = list(prompt[:-1]), None, 0
        for request in self.holds.values():
            if request.salt == salt:
                shared = common_length(wanted, request.token_ids[: _held(request)])
                if shared > longest:
                    best, longest = request, shared
        return best, longest


def _held(request: Request) -> int:
    """Leading tokens of a request whose K/V is cached; a stop may have cut its tokens behind verified ones."""
    return min(request.verified, len(request.token_ids))


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
