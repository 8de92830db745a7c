"""The decoding loop: draft, verify, accept, commit, for a batch that requests join and leave between steps.

One step of a request sends its pending tokens (the prompt at first, the anchor alone after) and its drafted tokens
through the target in one flat batch. The paper's loop (section 4; dflash 0.1.0 `dflash_generate`) is the case of one
request; prefill is the case of a long pending part and no draft.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from time import perf_counter

import torch
from torch import Tensor

from dflash_serve.errors import UserError
from dflash_serve.models.kv_cache import KVCache, Span
from dflash_serve.models.target import TargetModel
from dflash_serve.speculation.noise import fresh_seed
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.policy import FixedWidth, Step, WidthPolicy
from dflash_serve.speculation.statistics import AcceptanceStatistics

from .block_step import BlockSteps
from .grammar import Grammar
from .model_runner import Fetched, TargetRunner, at_least, sizes
from .request import KVCacheManager, LaunchedStep, Part, Request, StepResult, in_flight
from .sampler import Sampler
from .speculator import Speculator

log = logging.getLogger(__name__)

# From this number of requests on, stored features cost a noticeable part of a step (1 % at 32; injection, too).
LARGE_BATCH = 8
# Tokens of a shared prefix that are computed again rather than copied if the copy would make drafts impossible. In a
# small batch drafts save half a second to two seconds of an answer, the time of about 2,048 tokens of a prompt. In a
# large batch they save each request little.
WORTH, WORTH_IN_LARGE_BATCH = 2048, 32
# Rows of features that may wait for a draft. While nothing is drafted they are injected in portions of this size.
BACKLOG = 256


class Scheduler:
    """Target, drafter and their K/V caches, and the requests that are running.

    Args:
        speculator: None = no speculation.
        policy: chooses the widths; unused without a speculator.
        max_batch_size: requests that run at once.
        capacity: most tokens of one request, prompt and answer together.
        prefill_rows: most rows of one prompt in a step; bounds the memory of a long prompt's masks.
        reuse_prefixes: prompts may start from prefixes that earlier requests left in the K/V caches.
        shared: another scheduler's K/V cache of the target, and a manager of its entries (`KVCacheManager.beside`).
    """

    def __init__(
        self,
        target: TargetModel,
        speculator: Speculator | None,
        policy: WidthPolicy,
        *,
        max_batch_size: int,
        capacity: int,
        prefill_rows: int = 1024,
        reuse_prefixes: bool = True,
        shared: tuple[KVCache, KVCacheManager] | None = None,
    ) -> None:
        self.target, self.speculator, self.policy = target, speculator, policy
        self.capacity, self.prefill_rows = capacity, prefill_rows
        widest = speculator.block_size if speculator else 1
        self.cache, self.cache_manager = shared or (
            target.new_cache(max_batch_size, capacity + widest),
            KVCacheManager(max_batch_size, reuse=reuse_prefixes),
        )
        pool = speculator.drafter_runner.pool if speculator else None
        self.target_runner = TargetRunner(target, self.cache, widest, pool=pool)
        self.running: list[Request] = []
        self.sample = Sampler()
        self._ahead: list[LaunchedStep] = []  # handed to the next step, which reads them
        self._widths: dict[int, int] = {}  # of the coming step of each request, by id
        self._read_at = 0.0  # time at which the last step was read
        self.joined = 0
        self.statistics = AcceptanceStatistics()  # acceptance of all requests since this drafter was put in place
        self.earlier: tuple[AcceptanceStatistics, ...] = ()  # that of the drafters before it, the first one first

    @property
    def block_steps(self) -> BlockSteps:
        return BlockSteps(self.target_runner, self.speculator, self.sample)

    @property
    def free_entries(self) -> list[int]:
        """Cache entries without a running request."""
        return self.cache_manager.free

    @torch.inference_mode()
    def prepare(self) -> None:
        """Captures the CUDA graphs of all block steps that the policy can ask for, so that no request waits for one.

        The passes of requests that need the host between steps are captured when they first occur.
        """
        if not self.target_runner.static:
            return
        start, widest = perf_counter(), self.target_runner.widest
        widths = sizes(1, widest)
        if isinstance(self.policy, FixedWidth):
            widths = (at_least(self.policy.width, 1, widest),)
        self.block_steps.prepare(self.speculator.target_layer_ids if self.speculator else (), widths)
        log.info("captured %d CUDA graphs in %.1f s", self._prepared, perf_counter() - start)

    @property
    def _prepared(self) -> int:
        runners = self.target_runner, self.speculator and self.speculator.drafter_runner
        return sum(len(runner.captured) for runner in runners if runner)

    @torch.inference_mode()
    def join(
        self, token_ids: Sequence[int], params: SamplingParams, *, grammar: Grammar | None = None, salt: str = ""
    ) -> Request:
        """Adds a request; its prompt is prefilled in the next steps. There must be a free cache entry.

        Args:
            grammar: the grammar that its answer must match, unused so far.
            salt: only requests of the same salt share prefixes.

        Raises:
            UserError: as `check`, or an engine that shares the K/V cache still answers.
        """
        self.check(token_ids, params)
        if self.cache_manager.take_turn() and self.speculator is not None:
            self.speculator.clear_context()
        worth = self._draftable_worth()
        entry, donor, reused = self.cache_manager.allocate(token_ids, salt, draftable_worth=worth)
        try:
            injected = 0 if donor is None else self._copy_prefix(donor, entry, reused)
        except BaseException:
            self.cache_manager.release(entry, keep=False)
            raise
        request = Request(
            id=self.joined,
            entry=entry,
            token_ids=list(token_ids),
            prompt_length=len(token_ids),
            limit=min(self.capacity, len(token_ids) + (params.max_tokens or self.capacity)),
            params=params,
            seed=fresh_seed() if params.seed is None else params.seed,
            grammar=grammar,
            salt=salt,
            reused=reused,
            verified=reused,
            injected=injected,
            draftable=injected == reused and params.speculative != "off",
        )
        self.joined += 1
        if self.cache_manager.reuse:
            self.cache_manager.holds[entry] = request
        self.running.append(request)
        return request

    def check(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Refuses a prompt that cannot run.

        Raises:
            UserError: an empty prompt, one that leaves no room for an answer, token ids outside the vocabulary, or a
                wider block than the drafter's.
        """
        vocab_size = self.target.config.vocab_size
        if not token_ids:
            raise UserError("it has no tokens", where="prompt", do="send at least one")
        if len(token_ids) >= self.capacity:
            do = "shorten it, or raise limits.max_model_len if the target allows"
            raise UserError(f"{len(token_ids)} tokens, but the model holds {self.capacity}", where="prompt", do=do)
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            raise UserError(f"a token id is outside the vocabulary of {vocab_size}", where="prompt")
        if max(params.logit_bias, default=0) >= vocab_size:
            raise UserError(f"a token id is outside the vocabulary of {vocab_size}", where="logit_bias")
        most = self.speculator.block_size if self.speculator else 1
        if isinstance(params.speculative, int) and params.speculative > most:
            what = f"{params.speculative} slots, but a block has {most}" if self.speculator else "no drafter is served"
            raise UserError(what, where="speculative", do="leave it out, or send off")

    def leave(self, request: Request, *, sound: bool = True) -> None:
        """Removes a request, finished or not; its cache entry is free.

        Args:
            sound: False = its K/V may be broken (a step failed half-way) and is not reused.
        """
        self.running.remove(request)
        self.cache_manager.release(request.entry, keep=sound)
        self.policy.forget(request.id)

    @property
    def is_ahead(self) -> bool:
        """A step is launched whose tokens are not read yet."""
        return bool(self._ahead)

    def step(self) -> list[StepResult]:
        """Runs one step of every running request; finished requests leave.

        Of requests that need no host (`block_step`), the step after this one is launched before this one's tokens are
        read. The others run beside it: those that need the host, and those with a prompt to compute, which may join it
        later. On a CPU no step is launched ahead.
        """
        return self._guarded_step(ahead=True)

    def settle(self) -> list[StepResult]:
        """Runs a step, and launches none ahead: no step is in flight afterwards."""
        return self._guarded_step(ahead=False)

    @torch.inference_mode()
    def _guarded_step(self, *, ahead: bool) -> list[StepResult]:
        try:
            return self._step(go_on=ahead)
        except BaseException:
            self._ahead = []
            raise

    def replace_drafter(self, speculator: Speculator, policy: WidthPolicy) -> int:
        """Drafts by another speculator of the same block size from the next step on; no step may be in flight.

        Its context K/V would need the features of tokens that the target has read, which are gone. So requests that
        have begun go on without drafts, and no new request reuses a prefix of theirs or of earlier ones: it could not
        be drafted for. Answers stay as they are, since drafts decide no token.

        Returns:
            The number of requests that go on without drafts.
        """
        assert not self._ahead
        assert self.speculator is not None
        assert speculator.block_size == self.speculator.block_size
        speculator.drafter_runner.pool = self.target_runner.pool
        begun = [request for request in self.running if request.verified]
        for request in begun:
            request.draftable, request.injected = False, 0
            request.features.clear()
        self.cache_manager.holds.clear()
        self.target_runner.captured.clear()  # these passes draft by the drafter that leaves
        self.speculator, self.policy = speculator, policy
        self.earlier, self.statistics = (*self.earlier, self.statistics), AcceptanceStatistics()
        return len(begun)

    def _step(self, *, go_on: bool) -> list[StepResult]:
        start, prepared, requests = perf_counter(), self._prepared, list(self.running)
        decoding = [request for request in requests if request.is_decoding]
        block_steps, running = self.block_steps, {request.id for request in requests}
        held = {request.id for request in decoding if block_steps.holds(request)}
        on_device = [request for request in decoding if request.id in held]
        others = [request for request in requests if request.id not in held]
        ahead = self._ahead
        if running.isdisjoint(in_flight(ahead)):
            ahead = self._launch(on_device, others, [])
            if not ahead:
                self._choose_widths(decoding)
        for step in ahead:
            block_steps.choose(step)  # before other passes overwrite what it chooses from
        steps = [*ahead, self._run(others)] if others else ahead
        context_tokens = sum(step.context_tokens for step in steps)
        self._ahead = self._launch(on_device, others, ahead) if ahead and go_on else []
        results = [result for step in steps for result in self._read(step, running)]
        # Every token is on the host by now. Steps with a prefill or a capture are not timed.
        read_at, self._read_at = self._read_at, perf_counter()
        seconds = None
        if len(decoding) == len(requests) and self._prepared == prepared:
            seconds = self._read_at - (max(ahead[0].launched, read_at) if ahead else start)
        verified = {request.id for request in decoding}
        if learnt := [result.request for result in results if result.request.id in verified]:
            ids, last = [request.id for request in learnt], [request.steps[-1] for request in learnt]
            widths, counts = [width for width, _ in last], [count for _, count in last]
            self.policy.observe(Step(ids, widths, counts, seconds, context_tokens))
        return [self._finish(result) for result in results]

    def _launch(
        self, on_device: Sequence[Request], others: Sequence[Request], before: Sequence[LaunchedStep]
    ) -> list[LaunchedStep]:
        """Steps of the requests that need no host, behind those whose tokens are not read yet; none of none.

        It chooses the widths of the coming step for all requests.

        Args:
            others: the requests that run beside them. Those that need the host, and decode in the coming step, get a
                width, too.
        """
        flying = in_flight(before)
        # Every step brings a token: a request that lacks one ends in the step before.
        requests = [request for request in on_device if request.remaining > (request.id in flying)]
        if not requests:
            return []
        beside = [
            request
            for request in others
            if not self.block_steps.holds(request)
            and (request.is_decoding or len(request.token_ids) - request.verified <= self.prefill_rows)
        ]
        self._choose_widths([*requests, *beside])
        return self.block_steps.launch(requests, self._widths, before, self._wanted_features(requests))

    def _choose_widths(self, decoding: Sequence[Request]) -> None:
        widths = [1] * len(decoding)
        if self.speculator is not None and decoding:
            undraftable = {request.id for request in decoding if not request.draftable}
            context_tokens = sum(request.verified for request in decoding)
            widths = self.policy.widths([request.id for request in decoding], context_tokens, undraftable)
        each = zip(decoding, widths, strict=True)
        self._widths = {request.id: request.narrowed(width) for request, width in each}

    def _run(self, requests: list[Request]) -> LaunchedStep:
        """Launches a step of requests of any kind. Drafts and tokens go through the host."""
        drafts = self._draft(requests)
        pending = [request.pending[: self.prefill_rows] for request in requests]
        hidden, features = self._verify(requests, pending, drafts, self._wanted_features(requests))
        # A token is chosen where a pass reaches the end of what was pending.
        ends = (len(rows) == len(request.pending) for request, rows in zip(requests, pending, strict=True))
        widths = [1 + len(draft) if end else 0 for draft, end in zip(drafts, ends, strict=True)]
        tokens: Fetched | None = None
        raw: Sequence[Tensor | None] = [None] * len(requests)
        if any(widths):
            if sum(widths) < len(hidden):
                blocks = hidden.split([len(rows) + len(draft) for rows, draft in zip(pending, drafts, strict=True)])
                hidden = torch.cat([rows[len(rows) - width :] for rows, width in zip(blocks, widths, strict=True)])
            logits, chosen = self.target.logits(hidden), [i for i, width in enumerate(widths) if width]
            eos, raw = self.target.config.eos_token_ids, logits.split(widths)
            tokens = Fetched(self.sample([requests[i] for i in chosen], [drafts[i] for i in chosen], logits, eos))
        each = zip(requests, widths, map(len, pending), features, raw, strict=True)
        return LaunchedStep([Part(*part) for part in each], tokens)

    def _read(self, step: LaunchedStep, running: Collection[int]) -> list[StepResult]:
        """Waits for a step's tokens and commits them; requests that left meanwhile are passed over."""
        results = list[StepResult]()
        for part, tokens in zip(step.parts, step.gained(), strict=True):
            if part.request.id in running:
                results.append(StepResult.of(part, tokens))
                self._commit(part, results[-1])
        return results

    def _draftable_worth(self) -> int:
        if self.speculator is None or self.policy.paused:
            return 0
        return WORTH_IN_LARGE_BATCH if len(self.running) >= LARGE_BATCH else WORTH

    def _copy_prefix(self, donor: Request, entry: int, length: int) -> int:  # -> length of the drafter's context
        self.cache.copy(donor.entry, entry, length)
        if self.speculator is not None:
            if donor.injected < length:
                self.speculator.inject([donor])
            self.speculator.cache.copy(donor.entry, entry, min(length, donor.injected))
        return min(length, donor.injected)

    def _draft(self, requests: Sequence[Request]) -> list[list[int]]:
        widths = [min(self._widths.get(each.id, 1), each.remaining) if each.is_decoding else 1 for each in requests]
        drafts: list[list[int]] = [[] for _ in requests]
        wide = [i for i, width in enumerate(widths) if width > 1]
        if self.speculator is not None and wide:
            filled = self.speculator.draft([requests[i] for i in wide], [widths[i] for i in wide])
            for i, draft in zip(wide, filled, strict=True):
                drafts[i] = draft
        return drafts

    def _wanted_features(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """The target layers whose outputs are kept; none while speculation is paused in a large batch.

        Requests that ran without stored features cannot be drafted for again; new requests can. Pending features are
        injected first, so that prefixes that new requests reuse stay complete.
        """
        if self.speculator is None:
            return ()
        if len(self.running) < LARGE_BATCH or not self.policy.paused:
            return self.speculator.target_layer_ids if any(request.draftable for request in requests) else ()
        if self.cache_manager.reuse:
            self.speculator.inject(requests)
        for request in requests:
            request.draftable = False
            request.features.clear()
        return ()

    def _verify(
        self, requests: Sequence[Request], pending: list[list[int]], drafts: list[list[int]], layer_ids: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """One target pass over all rows -> hidden [rows, H] and each request's features [its rows, F*H].

        Features are copied, since the next pass may overwrite them. Those of a long prompt are copied for each request:
        a kept row would keep all rows of its tensor in memory.
        """
        blocks = [p + d for p, d in zip(pending, drafts, strict=True)]
        lengths = [len(block) for block in blocks]
        spans = [Span(request.entry, request.verified, n) for request, n in zip(requests, lengths, strict=True)]
        output = self.target_runner(blocks, spans, layer_ids)
        if output.features is None:
            return output.hidden, [None] * len(blocks)
        if max(lengths) <= self.target_runner.widest:  # one copy for all
            return output.hidden, list(output.features.clone().split(lengths))
        own = zip(requests, output.features.split(lengths), strict=True)
        return output.hidden, [rows.clone() if request.draftable else None for request, rows in own]

    def _commit(self, part: Part, result: StepResult) -> None:
        request, accepted = part.request, max(0, len(result.token_ids) - 1)
        if request.is_decoding:
            width = min(part.width, request.remaining)
            for statistics in (request.statistics, self.statistics):
                statistics.record(width, accepted)
            request.steps.append((width, accepted))
        request.verified += part.pending + accepted
        request.token_ids += result.token_ids
        if self.speculator is None or not request.draftable:
            return
        if part.injects:
            request.injected = request.verified
        elif part.features is not None and request.failure is None:
            request.features.append(part.features[: part.pending + accepted])
            if request.verified - request.injected >= BACKLOG:
                self.speculator.inject([request])

    def _finish(self, result: StepResult) -> StepResult:  # cut at the end of the answer
        request = result.request
        count = request.find_end(result.token_ids, self.target.config.eos_token_ids)
        request.cut(len(result.token_ids) - count)
        if request.finish_reason is None and request.failure is None and request.remaining <= 0:
            request.finish_reason = "length"
        if request.failure is not None:
            self.leave(request, sound=False)
            if self.target_runner.static:  # it may hold NaN
                self.cache.clear(request.entry)
                if self.speculator is not None:
                    self.speculator.cache.clear(request.entry)
        elif request.finish_reason is not None:
            self.leave(request)
        return result.first(count)
