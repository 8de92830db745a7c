"""What /metrics says, under the names that vLLM and SGLang have made usual, with our prefix.

A figure that is not known yet is left out, never 0.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dflash_serve.speculation.statistics import AcceptanceStatistics

from ..request import Request
from ..scheduler import Scheduler

if TYPE_CHECKING:
    from .worker import Worker

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
LABELS = ["model_name"]


class Metrics:
    """Latencies and counts as they happen; the rest is read from the worker when somebody asks."""

    def __init__(self, model_name: str) -> None:
        self.registry, self.model_name = CollectorRegistry(), model_name
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to the first token.")
        self._inter_token = self._histogram("inter_token_latency_seconds", "Between tokens, shared out over a step's.")
        self._end_to_end = self._histogram("e2e_request_latency_seconds", "Arrival to the end.")
        self._queue_time = self._histogram("request_queue_time_seconds", "Arrival to a slot.")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens taken in.")
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens whose K/V was reused.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        self._ended = Counter(
            "dflash:request_success", "Requests that ended.", [*LABELS, "finished_reason"], registry=self.registry
        )
        self._refused = Counter(
            "dflash:request_refused", "Requests refused at the door.", [*LABELS, "status"], registry=self.registry
        )

    def watch(self, worker: Worker) -> None:
        """Reads this worker at every scrape."""
        self.registry.register(_WorkerCollector(worker, self.model_name))

    def render(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self.registry)

    def joined(self, request: Request, waited: float) -> None:
        """A request got its slot."""
        self._queue_time.observe(waited)
        self._prompt.inc(request.prompt_length)
        self._cached.inc(request.reused)

    def first_token(self, tokens: int, seconds: float) -> None:
        """The first step that gave a request tokens."""
        self._first_token.observe(seconds)
        self._generated.inc(tokens)

    def tokens(self, tokens: int, seconds: float) -> None:
        """A later step: its time is shared out over its tokens."""
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
        family = Histogram(f"dflash:{name}", text, LABELS, registry=self.registry, buckets=SECONDS)
        return family.labels(self.model_name)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"dflash:{name}", text, LABELS, registry=self.registry).labels(self.model_name)


class _WorkerCollector(Collector):
    """Queue, slots and acceptance as they stand."""

    def __init__(self, worker: Worker, model_name: str) -> None:
        self.worker, self.model_name = worker, model_name

    def collect(self) -> Iterable[Metric]:
        yield self._gauge("num_requests_waiting", "Requests without a slot.", self.worker.waiting)
        yield self._gauge("num_requests_running", "Requests in the batch.", self.worker.running)
        if self.worker.engine is not None:
            yield from self._decoder(self.worker.engine.scheduler)

    def _decoder(self, scheduler: Scheduler) -> Iterable[Metric]:
        used = sum(request.verified for request in list(scheduler.running))
        room = scheduler.cache.entries * scheduler.capacity
        yield self._gauge("kv_cache_usage_perc", "Share of the K/V store in use (1 = all).", used / room)
        # A copy: the worker's thread goes on counting meanwhile.
        statistics = AcceptanceStatistics(Counts(dict(scheduler.statistics.tally)))
        tally = {key: steps for key, steps in statistics.tally.items() if key[0] > 1}
        yield self._total("spec_decode_num_drafts", "Steps that verified a draft.", sum(tally.values()))
        drafted = sum((width - 1) * steps for (width, _), steps in tally.items())
        yield self._total("spec_decode_num_draft_tokens", "Drafted tokens verified.", drafted)
        accepted = sum(gained * steps for (_, gained), steps in tally.items())
        yield self._total("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", accepted)
        if statistics.acceptance_length is not None:
            text = "Mean tokens gained per verified draft, the bonus token counted."
            yield self._gauge("spec_decode_acceptance_length", text, statistics.acceptance_length)
        yield from self._slots(statistics, scheduler.speculator.block_size if scheduler.speculator else 1)

    def _slots(self, statistics: AcceptanceStatistics, block: int) -> Iterable[Metric]:
        accepted = CounterMetricFamily(
            "dflash:spec_decode_num_accepted_tokens_per_pos", "By slot, from 0 on.", labels=[*LABELS, "position"]
        )
        survival = GaugeMetricFamily(
            "dflash:spec_decode_survival", "P(slot is accepted), where the width covered it.", labels=[*LABELS, "slot"]
        )
        for slot, probability in enumerate(statistics.survival(block), start=1):
            count = sum(steps for (_, gained), steps in statistics.tally.items() if gained >= slot)
            accepted.add_metric([self.model_name, str(slot - 1)], count)
            if probability is not None:
                survival.add_metric([self.model_name, str(slot)], probability)
        widths = CounterMetricFamily(
            "dflash:spec_decode_width", "Requests' steps by the width chosen.", labels=[*LABELS, "width"]
        )
        for width, steps in statistics.widths.items():
            widths.add_metric([self.model_name, str(width)], steps)
        yield from (accepted, survival, widths)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"dflash:{name}", text, labels=LABELS)
        family.add_metric([self.model_name], value)
        return family

    def _total(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"dflash:{name}", text, labels=LABELS)
        family.add_metric([self.model_name], value)
        return family
