"""A request between steps, a step from its launch to the tokens that it brings, and the entries of the K/V caches."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from torch import Tensor

from dflash_serve.answers.engine import FinishReason, TokenLogprob
from dflash_serve.errors import UserError
from dflash_serve.models.kv_cache import to_device
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics

from .grammar import Grammar
from .model_runner import Fetched, Shape

log = logging.getLogger(__name__)
# Marks a slot where the target's logits are NaN or infinite.
BROKEN = -2
NOT_FINITE = "the target's logits are NaN or infinite"


@dataclass
class Request:
    """Prompt and answer so far. Between steps the last token is the anchor: sampled, and not yet seen by the target."""

    id: int
    entry: int  # in the K/V caches
    token_ids: list[int]
    prompt_length: int
    limit: int  # length of prompt and answer together at which it ends
    params: SamplingParams
    seed: int = 0
    statistics: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)
    grammar: Grammar | None = None  # the grammar that the answer must match; None = any answer
    salt: str = ""  # only requests of the same salt share prefixes
    reused: int = 0  # prompt tokens whose K/V was copied instead of computed
    verified: int = 0  # tokens that the target has seen; their K/V is in its cache
    injected: int = 0  # leading tokens whose features are in the drafter's context
    features: list[Tensor] = field(default_factory=list)  # [rows, F*H] of tokens injected..verified, for the next draft
    draftable: bool = True  # False = the drafter's context has a gap: tokens verified without stored features
    steps: list[tuple[int, int]] = field(default_factory=list)  # (width, accepted) of each decoding step, in order
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the token that ended the answer; its text is not part of the answer
    failure: str | None = None  # the reason why it could not go on, and left

    @property
    def pending(self) -> list[int]:
        """Tokens that the target has not seen: the prompt at first, then the anchor alone."""
        return self.token_ids[self.verified :]

    @property
    def output_ids(self) -> list[int]:
        """The answer so far."""
        return self.token_ids[self.prompt_length :]

    @property
    def accepted_in_answer(self) -> int:
        """Accepted drafts that are in the answer; a step may accept more behind the answer's end."""
        return min(int(self.statistics.accepted or 0), max(0, len(self.output_ids) - 1 - len(self.steps)))

    @property
    def is_decoding(self) -> bool:
        """The target has seen the whole prompt; every further step verifies a block."""
        return self.verified >= self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens that it may still gain."""
        return self.limit - len(self.token_ids)

    def narrowed(self, width: int) -> int:
        """The width that it may have where the policy chose this one."""
        if not self.draftable:
            return 1
        most = self.params.speculative
        return min(width, most) if isinstance(most, int) else width

    @property
    def unconstrained(self) -> bool:
        """Its next tokens depend on the target's logits and its seed alone."""
        params = self.params
        if self.grammar is not None or params.penalised or params.logit_bias:
            return False
        return params.min_tokens <= len(self.token_ids) - self.prompt_length

    def find_end(self, tokens: Sequence[int], eos_token_ids: Sequence[int]) -> int:
        """Number of a step's tokens that belong to the answer, with its stop token; sets the finish_reason at its end.

        The grammar advances by these tokens. With `ignore_eos` an answer goes on after an end-of-sequence token, except
        under a grammar, where nothing could follow.
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
        """Removes the last tokens of the answer."""
        if tokens:
            del self.token_ids[-tokens:]


class KVCacheManager:
    """Free entries, and the request whose K/V each entry holds.

    Managers of the same entries take turns. A manager begins a turn when no request of another one runs, and forgets
    what the entries held in its turn before.
    """

    def __init__(self, count: int, *, reuse: bool = True) -> None:
        self.count = count
        self.free = list(range(count))  # free entries, the longest unused first
        self.reuse = reuse
        self.holds: dict[int, Request] = {}
        self._turn = [self]  # the manager whose turn it is; shared by managers of the same entries

    def beside(self, *, reuse: bool) -> KVCacheManager:
        """Another manager of the same entries, whose turn it is now.

        Raises:
            UserError: as `take_turn`.
        """
        made = KVCacheManager(self.count, reuse=reuse)
        made.free, made._turn = self.free, self._turn
        made.take_turn()
        return made

    def take_turn(self) -> bool:
        """Begins a turn; False if it is this manager's turn already.

        Raises:
            UserError: a request of another manager runs.
        """
        if self._turn[0] is self:
            return False
        if len(self.free) < self.count:
            what = "an engine that shares this one's K/V cache still answers"
            raise UserError(what, where="engine", do="read its streams to their ends, or close them")
        self._turn[0] = self
        self.holds.clear()
        return True

    def allocate(self, prompt: Sequence[int], salt: str, *, draftable_worth: int) -> tuple[int, Request | None, int]:
        """Takes a free entry for a prompt -> the entry, a donor and the length of the prefix that is its K/V.

        One entry must be free, in this manager's turn. Prefixes are reused from requests of the same salt only.

        Args:
            draftable_worth: tokens of prefix that are computed again rather than copied from a request with a gap in
                its drafter context, after which nothing could be drafted.
        """
        donor, reused = self._best_donor(prompt, salt, draftable_worth)
        others = [entry for entry in self.free if donor is None or entry != donor.entry]
        entry = others[0] if others else self.free[0]
        # The entry of a finished donor of which most is shared is used in place: nothing is copied, and little is lost.
        if donor is not None and donor.entry in self.free and 2 * reused >= _held(donor):
            entry = donor.entry
        self.free.remove(entry)
        self.holds.pop(entry, None)
        return entry, donor, reused

    def release(self, entry: int, *, keep: bool) -> None:
        """Frees an entry; `keep` = its contents are sound and may be reused."""
        self.free.append(entry)
        if not keep:
            self.holds.pop(entry, None)

    def _best_donor(self, prompt: Sequence[int], salt: str, draftable_worth: int) -> tuple[Request | None, int]:
        """The request that shares the most valuable prefix, and the prefix's length.

        The prompt's last token is always computed: its row gives the first token of the answer.
        """
        wanted, best, longest = list(prompt[:-1]), None, 0
        most = draftable_worth  # a request with no reused prefix has a complete drafter context
        for request in self.holds.values():
            if request.salt == salt:
                shared = common_length(wanted, request.token_ids[: _held(request)])
                whole = shared if request.draftable else min(shared, request.injected)
                for length, value in ((whole, whole + draftable_worth), (shared, shared)):
                    if length and value > most:
                        best, longest, most = request, length, value
        return best, longest


def _held(request: Request) -> int:  # tokens whose K/V is cached; a stop may have cut tokens behind them
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


@dataclass(frozen=True)
class Part:
    """One request's part of a step."""

    request: Request
    width: int  # the most tokens that it may gain; 0 = the pass ends inside its prompt, and no token is chosen
    pending: int = 1  # tokens that the target sees for the first time, without the drafts
    features: Tensor | None = None  # [rows, F*H] of these and of the drafts, for the next draft
    logits: Tensor | None = None  # [W, V], for logprobs
    injects: bool = False  # the pass itself writes the features of what it verifies to the drafter's context


class Passed(NamedTuple):
    """Outputs of a block step's pass, from which its tokens are chosen (`block_step`)."""

    shape: Shape
    known: Tensor
    hidden: Tensor


@dataclass
class LaunchedStep:
    """A step whose passes are launched, and whose tokens the host has not read."""

    parts: list[Part]
    tokens: Fetched | None = None  # see `gained`; None = nothing is chosen, or not yet
    passed: Passed | None = None  # of a block step whose tokens are not chosen yet
    launched: float = field(default_factory=perf_counter)
    context_tokens: int = field(init=False)  # of the requests that decode, at the launch

    def __post_init__(self) -> None:
        decoding = [part.request for part in self.parts if part.request.is_decoding]
        self.context_tokens = sum(request.verified for request in decoding)

    def gained(self) -> list[list[int]]:
        """Waits for the tokens that each request gains: its accepted drafted tokens and the bonus token.

        `tokens` is [N, W + 1] for the N parts of which tokens are chosen: the target's own token in every row, then the
        number of accepted drafted tokens.
        """
        rows = iter(self.tokens.tolist() if self.tokens else ())
        found = list[list[int]]()
        for part in self.parts:
            *tokens, accepted = next(rows) if part.width else (0,)
            found.append(tokens[: min(accepted + 1, part.width, part.request.remaining)])
        return found


def in_flight(steps: Sequence[LaunchedStep]) -> dict[int, int]:
    """The requests of these steps, by id, and the most tokens that each gains by them."""
    return {part.request.id: part.width for step in steps for part in step.parts}


@dataclass(frozen=True)
class StepResult:
    """Tokens that one step brought one request, and a logprob for each if requested."""

    request: Request
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None

    @classmethod
    def of(cls, part: Part, tokens: list[int]) -> StepResult:
        """The result of one request, which fails if a token could not be chosen."""
        request = part.request
        if BROKEN in tokens:
            request.failure, tokens = NOT_FINITE, []
            log.error("%s: a request ends with an error", NOT_FINITE)
        return cls(request, tokens, _logprobs(part.logits, tokens, request.params.logprobs))

    def first(self, count: int) -> StepResult:
        """The first `count` tokens of the result."""
        return StepResult(self.request, self.token_ids[:count], self.logprobs and self.logprobs[:count])


def _logprobs(rows: Tensor | None, tokens: list[int], top: int | None) -> list[TokenLogprob] | None:
    if top is None or rows is None:
        return None
    # rows [W, V]; exact under speculation, since row j decided token j
    logprobs = rows[: len(tokens)].float().log_softmax(-1)
    chosen = logprobs.gather(-1, to_device(tokens, rows.device)[:, None])[:, 0].tolist()
    best = logprobs.topk(top, dim=-1)
    tops = [list(zip(i, v, strict=True)) for i, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return [TokenLogprob(*entry) for entry in zip(tokens, chosen, map(tuple, tops), strict=True)]
