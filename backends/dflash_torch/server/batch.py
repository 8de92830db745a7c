"""The requests that run on the engine, and the streams that carry their chunks to HTTP handlers. No threads here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from copy import deepcopy
from dataclasses import dataclass, field
from time import monotonic

from dflash_serve.errors import UserError
from dflash_serve.outputs import Chunk
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics

from ..detokenizer import Answer
from ..engine import EmbeddedEngine
from ..grammar import Grammar
from ..request import Request
from ..sampler import StepResult
from .api_errors import ApiError
from .metrics import EngineSnapshot, ServerMetrics

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 8
"""So many failed steps without a good one between them: the engine is broken, and only a new process helps."""


class ResponseStream:
    """The chunks of one HTTP request, from the engine's thread to the request's handler.

    Args:
        answers: how many are generated for it; the stream ends with the last of them.
        on_cancel: tells the engine's thread to look at `cancelled`.
    """

    def __init__(self, answers: int, on_cancel: Callable[[], None]) -> None:
        self.answers, self._on_cancel = answers, on_cancel
        self.items: asyncio.Queue[Chunk | ApiError] = asyncio.Queue()
        self.finished: dict[int, Request] = {}
        """The scheduler's requests that have ended, by the index of their answer."""
        self.cancelled = False

    def cancel(self) -> None:
        """Nobody reads the stream any more: its cache entries are freed before the next step. Harmless at the end."""
        self.cancelled = True
        self._on_cancel()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """All chunks as they come, until the last answer has ended.

        Raises:
            ApiError: an answer could not be generated.
        """
        ended = 0
        while ended < self.answers:
            item = await self.items.get()
            if isinstance(item, ApiError):
                raise item
            ended += item.finish_reason is not None
            yield item


@dataclass(eq=False)
class EngineRequest:
    """One answer to generate: one of `n`, to one prompt of an HTTP request."""

    stream: ResponseStream
    index: int
    """Which answer of its stream it is."""
    token_ids: list[int]
    params: SamplingParams
    salt: str
    grammar: Grammar | None = None
    arrived: float = field(default_factory=monotonic)


Delivery = tuple[ResponseStream, Chunk | ApiError | None]
"""A stream, and what is to be put into it; None = one of its requests was cancelled and is gone."""


class RunningRequest:
    """A request in the scheduler, the answer that grows from it, and when its last chunk came (None = not yet)."""

    def __init__(self, queued: EngineRequest, answer: Answer) -> None:
        self.stream, self.arrived, self.answer = queued.stream, queued.arrived, answer
        self.last_chunk: float | None = None


class Batch:
    """What runs on one engine. A failure stays with the requests it belongs to."""

    def __init__(self, engine: EmbeddedEngine, metrics: ServerMetrics) -> None:
        self.engine, self.scheduler, self.metrics = engine, engine.scheduler, metrics
        self.running: dict[int, RunningRequest] = {}
        """Running requests by the id that the scheduler gave them."""
        self._failed_steps = 0

    @property
    def broken(self) -> bool:
        """Step after step has failed."""
        return self._failed_steps >= MAX_FAILED_STEPS

    def warm_up(self) -> None:
        """Generates one short answer before the server says it is ready, so that what is slow or broken shows now."""
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        list(self.engine.stream([[0, 1]], [params]))
        self.scheduler.statistics = AcceptanceStatistics()
        self.scheduler.cache_manager.holds.clear()

    def snapshot(self) -> EngineSnapshot:
        """Cache use and acceptance as they stand, copied."""
        scheduler = self.scheduler
        used = sum(request.verified for request in scheduler.running)
        return EngineSnapshot(
            cache_usage=used / (scheduler.cache.entries * scheduler.capacity),
            statistics=deepcopy(scheduler.statistics),
            block_size=self.engine.block_size,
        )

    def join(self, queued: EngineRequest) -> list[Delivery]:
        """Hands a request to the scheduler; there must be a free cache entry."""
        try:
            request = self.scheduler.join(queued.token_ids, queued.params, grammar=queued.grammar, salt=queued.salt)
        except Exception as error:
            log.exception("a request could not join")
            return [(queued.stream, ApiError(400 if isinstance(error, UserError) else 500, str(error)))]
        answer = Answer(queued.index, request, self.engine.tokenizer.backend_tokenizer)
        self.running[request.id] = RunningRequest(queued, answer)
        self.metrics.joined(request.prompt_length, request.reused, monotonic() - queued.arrived)
        return []

    def soon_reusable(self, queued: EngineRequest) -> bool:
        """Another answer to the same prompt is still computing what this one could copy once it is through."""
        siblings = [each.answer.request for each in self.running.values() if each.stream is queued.stream]
        same = [s for s in siblings if s.token_ids[: s.prompt_length] == queued.token_ids]
        return bool(same) and not any(s.is_decoding for s in same)

    def drop_cancelled(self) -> list[Delivery]:
        """Frees the cache entries of requests whose stream nobody reads."""
        gone = [request for request in self.scheduler.running if self.running[request.id].stream.cancelled]
        for request in gone:
            self.scheduler.leave(request)
            self.metrics.ended("abort")
        return [(self.running.pop(request.id).stream, None) for request in gone]

    def step(self) -> list[Delivery]:
        """One step of all running requests."""
        try:
            results = self.scheduler.step()
        except Exception:
            log.exception("a step failed: its %d requests fail with it, the server goes on", len(self.running))
            self._failed_steps += 1
            return self.fail(500, "the step that held this request failed; the server goes on, send it again")
        self._failed_steps = 0
        return [delivery for result in results if (delivery := self._deliver(result)) is not None]

    def fail(self, status: int, message: str) -> list[Delivery]:
        """Ends all running requests; what their cache entries hold is not trusted any more."""
        for request in list(self.scheduler.running):
            self.scheduler.leave(request, sound=False)
        failed, self.running = list(self.running.values()), {}
        for _ in failed:
            self.metrics.ended("error")
        return [(each.stream, ApiError(status, message)) for each in failed]

    def _deliver(self, result: StepResult) -> Delivery | None:
        """The chunk that a step brought one request, or why it failed; None while it is in its prompt."""
        request, running = result.request, self.running[result.request.id]
        item = _advance(running.answer, result)
        if isinstance(item, Chunk) and item.finish_reason is None:
            if not item.token_ids:
                return None
        else:
            del self.running[request.id]
            running.stream.finished[running.answer.index] = request
            if request in self.scheduler.running:  # a stop string, which the scheduler does not know of
                self.scheduler.leave(request)
        self._observe(running, len(result.token_ids), item)
        return running.stream, item

    def _observe(self, running: RunningRequest, tokens: int, item: Chunk | ApiError) -> None:
        now = monotonic()
        if running.last_chunk is None:
            self.metrics.first_tokens(tokens, now - running.arrived)
        else:
            self.metrics.later_tokens(tokens, now - running.last_chunk)
        running.last_chunk = now
        reason = "error" if isinstance(item, ApiError) else item.finish_reason
        if reason is not None:
            self.metrics.ended(reason, now - running.arrived)


def _advance(answer: Answer, result: StepResult) -> Chunk | ApiError:
    """The answer's next chunk; an error where the request has failed or its tokens cannot be turned into text."""
    request = result.request
    try:
        chunk = answer.advance(result)
    except Exception:
        log.exception("an answer could not be turned into text")
        request.failure = "the answer could not be turned into text"
    if request.failure is None:
        return chunk
    ungrammatical = request.grammar is not None and request.grammar.failure is not None
    return ApiError(400 if ungrammatical else 500, request.failure)
