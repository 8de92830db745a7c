"""The engine's thread as the server runs it, and the figures of /metrics.

News of answers go to the streams of the event loop and into the figures, which have the names of `facts`. A figure that
is not known yet is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from time import monotonic

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dflash_serve.backend import Chunk
from dflash_serve.errors import UserError
from dflash_serve.speculation.statistics import AcceptanceStatistics

from .. import facts
from ..answer import Answer, EngineStoppedError, Item, StepFailedError
from ..engine import EmbeddedEngine, EngineLoop, EngineThread
from ..request import Request
from .api import ApiError

STEP_FAILED = "the step that held this request failed; the server goes on, send it again"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
LABELS = ["model_name"]
NAMES = facts.FACTS.metrics


@dataclass(frozen=True)
class EngineSnapshot:
    """Figures of the engine at one moment."""

    waiting: int = 0
    running: int = 0
    cache_usage: float | None = None  # share of the K/V cache's rows; None while the engine loads
    statistics: AcceptanceStatistics | None = field(default=None, repr=False)  # of all requests since the start
    block_size: int | None = None  # B, the anchor counted; None without a drafter


class ServerMetrics:
    """Latencies and counts as they happen; the other figures come from a snapshot at every scrape."""

    def __init__(self, model_name: str) -> None:
        self.registry, self.model_name = CollectorRegistry(), model_name
        self._first_token = self._histogram(NAMES.time_to_first_token, "Arrival to the first token.")
        self._inter_token = self._histogram(
            NAMES.inter_token_latency, "Time between tokens; a step's tokens get equal shares."
        )
        self._end_to_end = self._histogram(NAMES.request_latency, "Arrival to the end.")
        self._queue_time = self._histogram(NAMES.queue_time, "Arrival to a cache entry.")
        self._prompt = self._counter(facts.PROMPT_TOKENS, "Prompt tokens taken in.")
        self._cached = self._counter(facts.CACHED_TOKENS, "Prompt tokens whose K/V was reused.")
        self._generated = self._counter(NAMES.generated, "Tokens generated.")
        labels = [*LABELS, "finished_reason"]
        self._ended = Counter(facts.REQUESTS_ENDED, "Requests that ended.", labels, registry=self.registry)
        for reason in ("stop", "length", "abort", "error"):  # from the start: a rate needs a first value
            self._ended.labels(model_name, reason)
        labels = [*LABELS, "status"]
        self._refused = Counter(facts.REQUESTS_REFUSED, "Requests not admitted.", labels, registry=self.registry)
        for status in ("429", "503"):
            self._refused.labels(model_name, status)

    def watch(self, snapshot: Callable[[], EngineSnapshot]) -> None:
        """Asks for a snapshot at every scrape."""
        self.registry.register(_SnapshotCollector(snapshot, self.model_name))

    def render(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self.registry)

    def joined(self, prompt_tokens: int, cached_tokens: int, seconds: float) -> None:
        """A request joined the batch, `seconds` after it arrived."""
        self._queue_time.observe(seconds)
        self._prompt.inc(prompt_tokens)
        self._cached.inc(cached_tokens)

    def first_tokens(self, tokens: int, seconds: float) -> None:
        """The first step that gave a request tokens, `seconds` after it arrived."""
        self._first_token.observe(seconds)
        self._generated.inc(tokens)

    def later_tokens(self, tokens: int, seconds: float) -> None:
        """A later step, `seconds` after the step before; each of its tokens gets an equal share."""
        self._generated.inc(tokens)
        for _ in range(tokens):
            self._inter_token.observe(seconds / tokens)

    def ended(self, reason: str, seconds: float | None = None) -> None:
        """A request ended: stop, length, abort or error."""
        self._ended.labels(self.model_name, reason).inc()
        if seconds is not None:
            self._end_to_end.observe(seconds)

    def refused(self, status: int) -> None:
        """A request was refused before it was queued."""
        self._refused.labels(self.model_name, str(status)).inc()

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, LABELS, registry=self.registry, buckets=SECONDS).labels(self.model_name)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self.registry).labels(self.model_name)


class _SnapshotCollector(Collector):  # queue, cache and acceptance as the metrics of one scrape
    def __init__(self, snapshot: Callable[[], EngineSnapshot], model_name: str) -> None:
        self.snapshot, self.model_name = snapshot, model_name

    def collect(self) -> Iterable[Metric]:
        now = self.snapshot()
        yield self._gauge(facts.QUEUED, "Requests in the queue.", now.waiting)
        yield self._gauge(facts.RUNNING, "Requests in the batch.", now.running)
        if now.cache_usage is not None:
            yield self._gauge(facts.CACHE_USAGE, "Share of the K/V cache in use (1 = all).", now.cache_usage)
        if now.statistics is not None:
            yield from self._acceptance(now.statistics)
            yield from self._slots(now.statistics, now.block_size or 1)

    def _acceptance(self, counts: AcceptanceStatistics) -> Iterable[Metric]:
        yield self._total(facts.DRAFTS, "Steps that verified a draft.", counts.verifications or 0)
        yield self._total(facts.DRAFTED, "Drafted tokens verified.", counts.drafted or 0)
        yield self._total(facts.ACCEPTED, "Drafted tokens accepted.", counts.accepted or 0)
        if counts.acceptance_length is not None:
            text = "Mean tokens gained per verified draft, the bonus token counted."
            yield self._gauge(facts.ACCEPTANCE_LENGTH, text, counts.acceptance_length)
        widths = self._counters(facts.WIDTHS, "Requests' steps by the width chosen.", "width")
        for width, steps in (counts.widths or {}).items():
            widths.add_metric([self.model_name, str(width)], steps)
        yield widths

    def _slots(self, counts: AcceptanceStatistics, block_size: int) -> Iterable[Metric]:
        accepted = self._counters(facts.ACCEPTED_BY_SLOT, "By slot, from 0 on.", "position")
        labels = [*LABELS, "slot"]
        survival = GaugeMetricFamily(facts.SURVIVAL, "P(slot is accepted), where the width covered it.", labels=labels)
        known = dict(enumerate(counts.accepted_by_slot or (), start=1))
        for slot, probability in enumerate(counts.survival(block_size), start=1):
            accepted.add_metric([self.model_name, str(slot - 1)], known.get(slot, 0))
            if probability is not None:
                survival.add_metric([self.model_name, str(slot)], probability)
        yield from (accepted, survival)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric([self.model_name], value)
        return family

    def _total(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric([self.model_name], value)
        return family

    def _counters(self, name: str, text: str, label: str) -> CounterMetricFamily:
        return CounterMetricFamily(name, text, labels=[*LABELS, label])


class ResponseStream:
    """The chunks of one HTTP request on their way from the engine's thread to the request's handler.

    Args:
        on_cancel: wakes the engine's thread.
    """

    def __init__(self, on_cancel: Callable[[], None]) -> None:
        self._on_cancel = on_cancel
        self.answers: list[Answer] = []  # all answers of the HTTP request; the stream ends with the last of them
        self.items: asyncio.Queue[Chunk | ApiError] = asyncio.Queue()
        self.cancelled = False

    @property
    def requests(self) -> list[Request]:
        """The scheduler's requests of all answers, which have joined."""
        return [answer.request for answer in self.answers if answer.request is not None]

    def cancel(self) -> None:
        """Frees the cache entries of all answers before the next step. Harmless after their end."""
        self.cancelled = True
        for answer in self.answers:
            answer.cancelled = True
        self._on_cancel()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """All chunks as they come, until the last answer has ended.

        Raises:
            ApiError: an answer could not be generated.
        """
        ended = 0
        while ended < len(self.answers):
            item = await self.items.get()
            if isinstance(item, ApiError):
                raise item
            ended += item.finish_reason is not None
            yield item


class EngineWorker(EngineThread):
    """Answers the requests of the event loop.

    Args:
        start: loads the engine; runs in the thread, so that the server answers while it loads.
        max_queued: requests that may wait for a cache entry.
    """

    def __init__(self, start: Callable[[], EmbeddedEngine], metrics: ServerMetrics, *, max_queued: int) -> None:
        super().__init__(start)
        self.metrics, self.max_queued = metrics, max_queued
        self.admitted = 0  # submitted and not ended; only the event loop changes it
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._news: list[tuple[ResponseStream, Chunk | ApiError | None]] = []
        self._last_chunk: dict[Answer, float] = {}  # time of the last chunk of each running answer that has one
        self._snapshot = EngineSnapshot()

    # --- called in the event loop

    def launch_from(self, event_loop: asyncio.AbstractEventLoop) -> None:
        """Starts the thread; streams are filled in this event loop."""
        self._event_loop = event_loop
        self.launch()

    def has_room(self, answers: int) -> bool:
        """True if cache and queue have room for `answers` more."""
        return self.admitted + answers <= self.most_admitted

    @property
    def most_admitted(self) -> int:
        """Cache entries and queue together."""
        assert self.engine is not None
        return self.engine.scheduler.cache.entries + self.max_queued

    def submit(self, answers: Sequence[Answer]) -> None:
        """Queues answers; there must be room."""
        assert self.loop is not None
        self.admitted += len(answers)
        self.loop.submit(answers)

    def wake(self) -> None:
        """Lets the thread see that answers were cancelled."""
        assert self.loop is not None
        self.loop.wake()

    @property
    def waiting(self) -> int:
        """Answers in the queue."""
        return len(self.loop.waiting) if self.loop else 0

    @property
    def running(self) -> int:
        """Answers in the batch."""
        return len(self.loop.running) if self.loop else 0

    def snapshot(self) -> EngineSnapshot:
        """Queue and batch now; the other figures as they were after the last step."""
        return replace(self._snapshot, waiting=self.waiting, running=self.running)

    def _receive(self, news: Sequence[tuple[ResponseStream, Chunk | ApiError | None]]) -> None:
        for stream, item in news:
            if not isinstance(item, Chunk) or item.finish_reason is not None:
                self.admitted -= 1
            if item is not None:
                stream.items.put_nowait(item)

    # --- called in the thread

    def deliver(self, answer: Answer, item: Item) -> None:
        """Measures news of an answer, and keeps them for its stream until the step is over."""
        assert isinstance(answer.group, ResponseStream)
        if answer.request is not None:
            self._measure(answer, answer.request, item)
        self._news.append((answer.group, _api_error(item) if isinstance(item, Exception) else item))
        if item is None:  # its place is free before the step
            self._post()

    def after_step(self, loop: EngineLoop) -> None:
        """Posts a step's news to the event loop in one call."""
        self._post()
        scheduler = loop.scheduler
        used = sum(request.verified for request in scheduler.running)
        self._snapshot = EngineSnapshot(
            cache_usage=used / (scheduler.cache.entries * scheduler.capacity),
            statistics=deepcopy(scheduler.statistics),
            block_size=self.engine.block_size if self.engine else None,
        )

    def _post(self) -> None:
        news, self._news = self._news, []
        if news and self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._receive, news)

    def _measure(self, answer: Answer, request: Request, item: Item) -> None:
        now, last = monotonic(), self._last_chunk.pop(answer, None)
        if last is None:
            self.metrics.joined(request.prompt_length, request.reused, (answer.joined or now) - answer.arrived)
        if isinstance(item, Chunk) and last is None:
            self.metrics.first_tokens(len(item.token_ids), now - answer.arrived)
        elif isinstance(item, Chunk) and last is not None:
            self.metrics.later_tokens(len(item.token_ids), now - last)
        if not isinstance(item, Chunk):
            self.metrics.ended("abort" if item is None else "error")
        elif item.finish_reason is not None:
            self.metrics.ended(item.finish_reason, now - answer.arrived)
        else:
            self._last_chunk[answer] = now


def _api_error(error: Exception) -> ApiError:
    if isinstance(error, EngineStoppedError):
        return ApiError(503, "the server is shutting down")
    if isinstance(error, StepFailedError):
        return ApiError(500, STEP_FAILED)
    return ApiError(400 if isinstance(error, UserError) else 500, str(error))
