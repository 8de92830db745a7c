"""How long the drafter takes, without making the GPU wait: events are read when they have passed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from time import perf_counter
from typing import Any

from .metrics import Metrics
from .results import listen

PENDING = 64
"""Most events that wait to be read; older ones are forgotten."""


def on_worker_built(build: Callable[..., None], worker: Any, *args: Any, **kwargs: Any) -> None:
    """Around the worker's constructor: on the first rank, with metrics on, counts and measures."""
    build(worker, *args, **kwargs)
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import get_parallel

    settings = resolving_view(worker.server_args)
    if not settings.enable_metrics or get_parallel().tp_rank != 0:
        return
    metrics = Metrics(settings.served_model_name)
    listen(metrics)
    runner = worker.draft_model_runner
    runner.forward = timed(runner.forward, str(worker.device), metrics.drafted)


@contextmanager
def unwatched(runner: Any) -> Iterator[None]:
    """While passes are run for their own sake."""
    watched = runner.forward
    runner.forward = getattr(watched, "__wrapped__", watched)
    try:
        yield
    finally:
        runner.forward = watched


def timed(forward: Callable[..., Any], device: str, report: Callable[[float], None]) -> Callable[..., Any]:
    """The same function, reporting the seconds of each call."""
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
