"""The engine's thread, the streams of its answers to the event loop, and the figures of /metrics.

The figures have the names of `facts`. A figure that is not known yet is left out.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dflash_serve.adapter.counters import COUNTERS, PACE, slot_counts
from dflash_serve.adapter.last_run import pace_of
from dflash_serve.answers.engine import Chunk
from dflash_serve.common.progress import shown
from dflash_serve.errors import UserError
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

from .. import facts
from ..answer import Item, PendingAnswer, StepFailedError
from ..engine import EmbeddedEngine, EngineLoop
from ..request import Request
from .api import ApiError

log = logging.getLogger(__name__)
T = TypeVar("T")
STEP_FAILED = "the step that held this request failed; the server goes on, send it again"
# After this many failed steps in a row the engine is broken: only a new process helps.
MAX_FAILED_STEPS = 8
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
LABELS = ["model_name"]
NAMES = facts.FACTS.metrics


@dataclass(frozen=True)
class EngineSnapshot:
    """Figures of the engine at one moment."""

    waiting: int = 0
    running: int = 0
    cache_usage: float | None = None  # share of the K/V cache's rows; None while the engine loads
    statistics: AcceptanceStatistics | None = field(default=None, repr=False)  # since the served drafter is in place
    earlier: tuple[AcceptanceStatistics, ...] = field(default=(), repr=False)  # of the drafters before it
    block_size: int | None = None  # B, the anchor counted; None without a drafter
    pace: tuple[float, float] = (0.0, 0.0)  # tokens gained and expected; 0 where the width is fixed


class ServerMetrics(Collector):
    """Latencies and counts as they happen; the other figures come from a snapshot at every scrape.

    Args:
        snapshot: gives the figures of this moment, in any thread.
    """

    def __init__(self, model_name: str, snapshot: Callable[[], EngineSnapshot]) -> None:
        self.registry, self.model_name, self._snapshot = CollectorRegistry(), model_name, snapshot
        self._first_token = self._histogram(NAMES.time_to_first_token, "Arrival to the first token.")
        self._inter_token = self._histogram(
            NAMES.inter_token_latency, "Time between tokens; a step's tokens get equal shares."
        )
        self._end_to_end = self._histogram(NAMES.request_latency, "Arrival to the end.")
        self._queue_time = self._histogram(NAMES.queue_time, "Arrival to a cache entry.")
        self._prompt = self._counter(facts.PROMPT_TOKENS, "Prompt tokens taken in.").labels(model_name)
        self._cached = self._counter(facts.CACHED_TOKENS, "Prompt tokens whose K/V was reused.").labels(model_name)
        self._generated = self._counter(NAMES.generated, "Tokens generated.").labels(model_name)
        self._ended = self._counter(facts.REQUESTS_ENDED, "Requests that ended.", "finished_reason")
        for reason in ("stop", "length", "abort", "error"):  # from the start: a rate needs a first value
            self._ended.labels(model_name, reason)
        self._refused = self._counter(facts.REQUESTS_REFUSED, "Requests not admitted.", "status")
        for status in ("429", "503"):
            self._refused.labels(model_name, status)
        self._last_chunk: dict[PendingAnswer, float] = {}  # time of the last chunk of each running answer that has one
        self.registry.register(self)

    def render(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self.registry)

    def refused(self, status: int) -> None:
        """A request was refused before it was queued."""
        self._refused.labels(self.model_name, str(status)).inc()

    def observe(self, answer: PendingAnswer, request: Request, item: Item) -> None:
        """Measures news of an answer that is or was in the batch."""
        now, last = monotonic(), self._last_chunk.pop(answer, None)
        if last is None:
            self._queue_time.observe((answer.joined or now) - answer.arrived)
            self._prompt.inc(request.prompt_length)
            self._cached.inc(request.reused)
        if not isinstance(item, Chunk):
            self._ended.labels(self.model_name, "abort" if item is None else "error").inc()
            return
        tokens = len(item.token_ids)
        self._generated.inc(tokens)
        if last is None:
            self._first_token.observe(now - answer.arrived)
        else:
            for _ in range(tokens):
                self._inter_token.observe((now - last) / tokens)
        if item.finish_reason is None:
            self._last_chunk[answer] = now
        else:
            self._ended.labels(self.model_name, item.finish_reason).inc()
            self._end_to_end.observe(now - answer.arrived)

    def collect(self) -> Iterable[Metric]:
        """Queue, cache and acceptance as the metrics of one scrape.

        SGLang's router joins its workers' pages, and fails where a family has samples on one and none on another.
        """
        return (family for family in self._now() if family.samples)

    def _now(self) -> Iterable[Metric]:
        now = self._snapshot()
        yield self._family(GaugeMetricFamily, facts.QUEUED, "Requests in the queue.", now.waiting)
        yield self._family(GaugeMetricFamily, facts.RUNNING, "Requests in the batch.", now.running)
        usage = "Share of the K/V cache in use (1 = all)."
        yield self._family(GaugeMetricFamily, facts.CACHE_USAGE, usage, now.cache_usage)
        counts = now.statistics
        if counts is None:
            return
        block, revisions = now.block_size or 1, (*now.earlier, counts)
        counts = total(revisions)
        length = "Mean tokens gained per verified draft, the bonus token counted."
        yield self._family(GaugeMetricFamily, facts.ACCEPTANCE_LENGTH, length, counts.acceptance_length)
        yield from self._slots([slot_counts(one, block) for one in revisions])
        for (name, about), value in zip(PACE.items(), now.pace, strict=True):
            yield self._family(CounterMetricFamily, name, about, value)
        yield from self._earlier(counts, block)

    def _slots(self, revisions: Sequence[Mapping[str, Mapping[int, float]]]) -> Iterable[Metric]:
        for name, (label, about) in COUNTERS.items():
            family = CounterMetricFamily(name, about, labels=[*LABELS, label, facts.REVISION])
            for revision, counts in enumerate(revisions):
                for key, number in counts[name].items():
                    family.add_metric([self.model_name, str(key), str(revision)], number)
            yield family

    def _earlier(self, counts: AcceptanceStatistics, block_size: int) -> Iterable[Metric]:
        """The counters by their names of release 0.2."""
        counter, about = CounterMetricFamily, "Replaced by dflash_serve:steps and dflash_serve:slots_*."
        yield self._family(counter, facts.DRAFTS, about, counts.verifications)
        yield self._family(counter, facts.DRAFTED, about, counts.drafted)
        yield self._family(counter, facts.ACCEPTED, about, counts.accepted)
        yield self._family(counter, facts.WIDTHS, about, counts.widths or {}, "width")
        accepted, survival = counts.accepted_by_slot or [], counts.survival(block_size)
        by_position = dict(enumerate([*accepted, *[0.0] * (len(survival) - len(accepted))]))
        yield self._family(counter, facts.ACCEPTED_BY_SLOT, about, by_position, "position")
        yield self._family(GaugeMetricFamily, facts.SURVIVAL, about, dict(enumerate(survival, start=1)), "slot")

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, LABELS, registry=self.registry, buckets=SECONDS).labels(self.model_name)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, [*LABELS, *labels], registry=self.registry)

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        value: float | Mapping[int, float | None] | None,
        label: str | None = None,
    ) -> Metric:  # with a sample for each number that is known; `label` tells several apart
        family = kind(name, text, labels=LABELS if label is None else [*LABELS, label])
        for key, number in value.items() if isinstance(value, Mapping) else [(None, value)]:
            if number is not None:
                family.add_metric([self.model_name] if label is None else [self.model_name, str(key)], number)
        return family


class ResponseStream:
    """The chunks of one HTTP request on their way from the engine's thread to the request's handler.

    Args:
        on_cancel: wakes the engine's thread.
    """

    def __init__(self, on_cancel: Callable[[], None]) -> None:
        self._on_cancel = on_cancel
        self.answers: list[PendingAnswer] = []  # all answers of the HTTP request; the stream ends with the last of them
        self.items: asyncio.Queue[Chunk | ApiError] = asyncio.Queue()

    def cancel(self) -> None:
        """Frees the cache entries of all answers before the next step. Harmless after their end."""
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


class EngineWorker:
    """A thread that loads an engine, and runs the steps of a loop over it while there is work.

    Args:
        start: loads the engine; runs in the thread, so that the server answers while it loads.
        model: the name in the API and in the metrics.
        max_queued: requests that may wait for a cache entry.
    """

    def __init__(self, start: Callable[[], EmbeddedEngine], model: str, *, max_queued: int) -> None:
        self._start, self.model, self.max_queued = start, model, max_queued
        self.metrics = ServerMetrics(model, self.snapshot)
        self.engine: EmbeddedEngine | None = None
        self.loop: EngineLoop | None = None
        self.state: Literal["loading", "ready", "broken", "stopped"] = "loading"
        self.fatal: BaseException | None = None  # the exception that prevented the engine from loading
        self.admitted = 0  # submitted and not ended; only the event loop changes it
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._news: list[tuple[ResponseStream, Chunk | ApiError | None]] = []
        self._snapshot = EngineSnapshot()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- called in the event loop

    def launch_from(self, event_loop: asyncio.AbstractEventLoop) -> None:
        """Starts the thread; streams are filled in this event loop."""
        self._event_loop = event_loop
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> bool:
        """Ends the thread after its step; False = the step still runs after `timeout` seconds."""
        self._stopping.set()
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def has_room(self, answers: int) -> bool:
        """True if cache and queue have room for `answers` more."""
        return self.admitted + answers <= self.most_admitted

    @property
    def most_admitted(self) -> int:
        """Cache entries and queue together."""
        assert self.engine is not None
        return self.engine.scheduler.cache.entries + self.max_queued

    def submit(self, answers: Sequence[PendingAnswer]) -> None:
        """Queues answers; there must be room."""
        assert self.loop is not None
        self.admitted += len(answers)
        self.loop.submit(answers)

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Has work done in the thread, between two steps."""
        assert self.loop is not None
        return self.loop.call(work)

    def wake(self) -> None:
        """Lets the thread see that answers were cancelled, or that it is to stop."""
        if self.loop is not None:
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

    def deliver(self, answer: PendingAnswer, item: Item) -> None:
        """Measures news of an answer, and keeps them for its stream until the step is over."""
        assert isinstance(answer.group, ResponseStream)
        if answer.request is not None:
            self.metrics.observe(answer, answer.request, item)
        self._news.append((answer.group, _api_error(item) if isinstance(item, Exception) else item))
        # A cancelled one's place is free before the step; another thread's step is not followed by `_after_step` here.
        if item is None or threading.current_thread() is not self._thread:
            self._post()

    def _run(self) -> None:
        try:
            with shown(log=log.info):
                engine = self._start()
                engine.warm_up()
        except BaseException as error:  # the server reports it and ends
            self.fatal, self.state = error, "broken"
            return
        self.engine, self.loop = engine, engine.loop
        self._after_step(engine)
        self.state = "ready"
        while self._wait_for_work(engine.loop):
            engine.loop.step()
            self._after_step(engine)
            if engine.loop.failed_steps >= MAX_FAILED_STEPS:
                self.state = "broken"
        if self.state == "ready":
            self.state = "stopped"
        engine.loop.fail(ApiError(503, "the server is shutting down"), waiting=True)
        self._after_step(engine)

    def _wait_for_work(self, loop: EngineLoop) -> bool:
        with loop.changed:
            while not (self._stopping.is_set() or loop.waiting or loop.running or loop.calls):
                loop.changed.wait()
        return not self._stopping.is_set()

    def _after_step(self, engine: EmbeddedEngine) -> None:
        self._post()
        scheduler = engine.scheduler
        used, pace = sum(request.verified for request in scheduler.running), pace_of(scheduler.policy)
        self._snapshot = EngineSnapshot(
            cache_usage=used / (scheduler.cache.entries * scheduler.capacity),
            statistics=deepcopy(scheduler.statistics),
            earlier=scheduler.earlier,
            block_size=engine.block_size,
            pace=(pace.gained, pace.expected) if pace else (0.0, 0.0),
        )

    def _post(self) -> None:  # news go to the event loop in one call
        news, self._news = self._news, []
        if news and self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._receive, news)


def _api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, StepFailedError):
        return ApiError(500, STEP_FAILED)
    if isinstance(error, UserError):
        return ApiError(400, str(error), param=error.where or None, code="invalid_value")
    return ApiError(500, str(error))
