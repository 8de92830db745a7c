"""One request's state between steps, and which entry of the K/V caches it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dflash_serve.outputs import FinishReason
from dflash_serve.speculation.noise import fresh_seed
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics

from .grammar import Grammar


@dataclass(frozen=True)
class Allocation:
    """The entry of a new request; its first `reused` tokens are to be copied from `donor`, None where there is none."""

    entry: int
    donor: Request | None = None
    reused: int = 0


@dataclass
class Request:
    """Prompt and answer so far. Between steps the last token is the anchor: sampled, but not yet through the target."""

    id: int
    entry: int
    """Where the K/V caches hold its K/V."""
    token_ids: list[int]
    prompt_length: int
    limit: int
    """Length of prompt and answer at which it ends."""
    params: SamplingParams
    seed: int
    statistics: AcceptanceStatistics
    grammar: Grammar | None = None
    """What the answer must match; None = anything."""
    salt: str = ""
    """Only requests of the same salt share prefixes."""
    reused: int = 0
    """Tokens of the prompt that were copied instead of computed."""
    verified: int = 0
    """Tokens that went through the target; their K/V is in its cache."""
    injected: int = 0
    """Leading tokens whose features are in the drafter's context; they stay there, whatever comes behind them."""
    features: list[Tensor] = field(default_factory=list)
    """Features [rows, F*H] of tokens injected..verified, waiting for the next draft."""
    draftable: bool = True
    """False = some of its tokens were verified while no features were kept: the drafter's context has a gap."""
    steps: list[tuple[int, int]] = field(default_factory=list)
    """(width, accepted) of each decoding step, in order."""
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    """The token that ended the answer; its text is no part of it."""
    failure: str | None = None
    """Why it could not go on, where that is its own fault; it has left then."""

    @classmethod
    def allocated(
        cls,
        number: int,
        allocation: Allocation,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        limit: int,
        grammar: Grammar | None,
        salt: str,
    ) -> Request:
        """A new request in its cache entry, with the prefix that was copied there."""
        donor, reused = allocation.donor, allocation.reused
        injected = min(reused, donor.injected) if donor else 0
        return cls(
            id=number,
            entry=allocation.entry,
            token_ids=list(prompt),
            prompt_length=len(prompt),
            limit=limit,
            params=params,
            seed=fresh_seed() if params.seed is None else params.seed,
            statistics=AcceptanceStatistics(),
            grammar=grammar,
            salt=salt,
            reused=reused,
            verified=reused,
            injected=injected,
            draftable=injected == reused,
        )

    @property
    def pending(self) -> list[int]:
        """Tokens the target has not seen: the prompt at first, the anchor alone after."""
        return self.token_ids[self.verified :]

    @property
    def output_ids(self) -> list[int]:
        """The answer so far."""
        return self.token_ids[self.prompt_length :]

    @property
    def is_decoding(self) -> bool:
        """The prompt is through; every further step verifies a block."""
        return self.verified >= self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens it may still gain."""
        return self.limit - len(self.token_ids)

    def find_end(self, tokens: Sequence[int], eos_token_ids: Sequence[int]) -> int:
        """How many of a step's tokens belong to the answer, the stop token counted; notes why it ends, if it does.

        The grammar advances with them. `ignore_eos` lets an answer go on behind an end-of-sequence token, except under
        a grammar, where nothing could follow.
        """
        stops = set(self.params.stop_token_ids)
        if self.grammar is not None or not self.params.ignore_eos:
            stops.update(eos_token_ids)
        for count, token in enumerate(tokens, start=1):
            if self.grammar is not None:
                self.grammar.advance(token)
                self.failure = self.grammar.failure
            if self.failure is not None:
                return 0
            if token in stops:
                self.stop_token = token
            if token in stops or (self.grammar is not None and self.grammar.finished):
                self.finish_reason = "stop"
                return count
        return len(tokens)

    def cut(self, tokens: int) -> None:
        """Forgets the last tokens of the answer."""
        if tokens:
            del self.token_ids[-tokens:]


class KVCacheManager:
    """Free and taken entries, and the request that each holds the K/V of."""

    def __init__(self, count: int, *, reuse: bool = True) -> None:
        self.free = list(range(count))
        """The longest unused first."""
        self.reuse = reuse
        self.holds: dict[int, Request] = {}

    def allocate(self, prompt: Sequence[int], salt: str, *, draftable_worth: int) -> Allocation:
        """Takes a free entry for a prompt; only requests of the same salt lend their prefix. One must be free.

        Args:
            draftable_worth: tokens of prefix to be computed again rather than to take them from a request whose context
                in the drafter's cache has a gap there, behind which nothing could be drafted.
        """
        donor, reused = self._best_donor(prompt, salt, draftable_worth)
        others = [entry for entry in self.free if donor is None or entry != donor.entry]
        entry = others[0] if others else self.free[0]
        # In place where the donor is over and mostly shared: nothing to copy, and little is lost.
        if donor is not None and donor.entry in self.free and 2 * reused >= _held(donor):
            entry = donor.entry
        self.free.remove(entry)
        self.holds.pop(entry, None)
        return Allocation(entry, donor, reused)

    def give_back(self, allocation: Allocation) -> None:
        """Frees an entry that no request came to have."""
        self.free.append(allocation.entry)

    def assign(self, request: Request) -> None:
        """Notes that the request has its entry, so that what it holds can be lent."""
        if self.reuse:
            self.holds[request.entry] = request

    def release(self, request: Request, *, keep: bool) -> None:
        """Frees the entry; `keep` = its contents are sound and may still be lent."""
        self.free.append(request.entry)
        if not keep:
            self.holds.pop(request.entry, None)

    def _best_donor(self, prompt: Sequence[int], salt: str, draftable_worth: int) -> tuple[Request | None, int]:
        """The request that shares the most valuable prefix, and the prefix's length.

        The prompt's last token is always computed: its row gives the first token of the answer.
        """
        wanted, best, longest = list(prompt[:-1]), None, 0
        most = draftable_worth  # who borrows nothing can be drafted for
        for request in self.holds.values():
            if request.salt == salt:
                shared = common_length(wanted, request.token_ids[: _held(request)])
                whole = shared if request.draftable else min(shared, request.injected)
                for length, value in ((whole, whole + draftable_worth), (shared, shared)):
                    if length and value > most:
                        best, longest, most = request, length, value
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
