"""Prometheus metrics of a running server: every verification, and the drafter's passes.

They stand on the same page as SGLang's own. Readers derive from them: survival of slot k = slots_accepted{slot="k"} /
slots_offered{slot="k"}; acceptance length = 1 + sum of slots_accepted / steps over widths > 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from time import perf_counter
from typing import Any

from dflash_sglang.facts import ACCEPTED, DRAFT_SECONDS, OFFERED, PARTS, STEPS, SUSPENDED

from . import results

SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0)
"""Upper bounds of the histogram's buckets."""
PENDING = 64  # maximum number of unread pairs of GPU events; older ones are dropped


class SpeculationMetrics:
    """Prometheus metrics of acceptance by slot, of widths, and of the drafter's time."""

    def __init__(self, model_name: str) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        def counter(name: str, what: str, label: str) -> Counter:
            return Counter(name, what, ["model_name", label])

        self._model = model_name
        self._offered = counter(OFFERED, "Drafted tokens that were verified, by slot of the block.", "slot")
        self._accepted = counter(ACCEPTED, "Drafted tokens that were accepted, by slot of the block.", "slot")
        self._steps = counter(STEPS, "Verifications of one request, by width (the anchor counted).", "width")
        self._parts = counter(PARTS, "Seconds of the host, by part of a step.", "part")
        what = "1 while acceptance has collapsed and only probes are drafted."
        self._suspended = Gauge(SUSPENDED, what, ["model_name"], multiprocess_mode="max")
        what = "Time of one drafter pass over a batch."
        self._drafting = Histogram(DRAFT_SECONDS, what, ["model_name"], buckets=SECONDS)

    def verified(self, step: results.StepResult) -> None:
        """Counts a step."""
        requests = len(step.accepted)
        if not requests:
            return
        self._steps.labels(self._model, str(step.width)).inc(requests)
        counts = [count for _, count in step.accepted]
        for slot in range(1, step.width):
            self._offered.labels(self._model, str(slot)).inc(requests)
            self._accepted.labels(self._model, str(slot)).inc(sum(count >= slot for count in counts))

    def took(self, part: str, seconds: float) -> None:
        """Counts a part of a step."""
        self._parts.labels(self._model, part).inc(seconds)

    def suspended(self, raised: bool) -> None:
        """Sets whether acceptance has collapsed."""
        self._suspended.labels(self._model).set(float(raised))

    def drafted(self, seconds: float) -> None:
        """Counts a drafter pass."""
        self._drafting.labels(self._model).observe(seconds)


def watch(worker: Any) -> None:
    """Attaches metrics to a built worker, on the first rank and if SGLang's metrics are on."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import get_parallel

    settings = resolving_view(worker.server_args)
    if not settings.enable_metrics or get_parallel().tp_rank != 0:
        return
    metrics = SpeculationMetrics(settings.served_model_name)
    results.STEPS.listeners.append(metrics)
    results.STEPS.report_part, results.STEPS.report_alarm = metrics.took, metrics.suspended
    runner = worker.draft_model_runner
    runner.forward = timed(runner.forward, str(worker.device), metrics.drafted)


@contextmanager
def unwatched(runner: Any) -> Iterator[None]:
    """Does not time the drafter's passes meanwhile, such as those of a calibration."""
    watched = runner.forward
    runner.forward = getattr(watched, "__wrapped__", watched)
    try:
        yield
    finally:
        runner.forward = watched


def timed(forward: Callable[..., Any], device: str, report: Callable[[float], None]) -> Callable[..., Any]:
    """Wraps a function so that it reports the seconds of each call."""
    return _timed_on_gpu(forward, report) if device.startswith("cuda") else _timed_on_host(forward, report)


def _timed_on_host(forward: Callable[..., Any], report: Callable[[float], None]) -> Callable[..., Any]:
    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        output = forward(*args, **kwargs)
        report(perf_counter() - start)
        return output

    return call


def _timed_on_gpu(forward: Callable[..., Any], report: Callable[[float], None]) -> Callable[..., Any]:
    import torch

    waiting: deque[tuple[Any, Any]] = deque(maxlen=PENDING)

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        while waiting and waiting[0][1].query():
            start, end = waiting.popleft()
            report(start.elapsed_time(end) / 1000)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        output = forward(*args, **kwargs)
        end.record()
        waiting.append((start, end))
        return output

    return call
