"""What /metrics says, under the names of `facts`. A figure that is not known yet is left out, never 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dflash_serve.speculation.statistics import AcceptanceStatistics

from .. import facts

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
LABELS = ["model_name"]
NAMES = facts.FACTS.metrics


@dataclass(frozen=True)
class EngineSnapshot:
    """The engine at one moment. Nobody changes what it holds."""

    waiting: int = 0
    """Requests in the queue."""
    running: int = 0
    """Requests in the batch."""
    cache_usage: float | None = None
    """Share of the K/V cache's rows in use, 0 to 1; None while the engine loads, and so the next two."""
    statistics: AcceptanceStatistics | None = field(default=None, repr=False)
    """Acceptance of all requests that ever ran."""
    block_size: int | None = None
    """B, the anchor counted; None without a drafter."""


class ServerMetrics:
    """Latencies and counts as they happen; the rest comes from a snapshot at every scrape."""

    def __init__(self, model_name: str) -> None:
        self.registry, self.model_name = CollectorRegistry(), model_name
        self._first_token = self._histogram(NAMES.time_to_first_token, "Arrival to the first token.")
        self._inter_token = self._histogram(NAMES.inter_token_latency, "Between tokens, shared out over a step's.")
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
        """A later step, `seconds` after the one before; they are shared out over its tokens."""
        self._generated.inc(tokens)
        for _ in range(tokens):
            self._inter_token.observe(seconds / tokens)

    def ended(self, reason: str, seconds: float | None = None) -> None:
        """A request is over: stop, length, abort or error."""
        self._ended.labels(self.model_name, reason).inc()
        if seconds is not None:
            self._end_to_end.observe(seconds)

    def refused(self, status: int) -> None:
        """A request was turned away before it was queued."""
        self._refused.labels(self.model_name, str(status)).inc()

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, LABELS, registry=self.registry, buckets=SECONDS).labels(self.model_name)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self.registry).labels(self.model_name)


class _SnapshotCollector(Collector):
    """Queue, cache and acceptance as the metrics of one scrape."""

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
        """Every slot of the block has its counter, from the start; its survival only once it was verified."""
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
