"""Results of every step, for the width policy and for Prometheus.

The metrics stand on the same page as SGLang's own. Readers derive from them: survival of slot k =
slots_accepted{slot="k"} / slots_offered{slot="k"}; acceptance length = 1 + sum of slots_accepted / steps of widths > 1.
"""

from __future__ import annotations

from collections import Counter as Numbers
from collections import deque
from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import Any

from dflash_serve.speculation.policy import Step
from dflash_sglang.facts import ACCEPTED, DRAFT_SECONDS, OFFERED, STEPS

_MARK = "_dflash_serve_launch"  # attribute of SGLang's results: number of the launch, and context tokens
SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0)
"""Upper bounds of the histogram's buckets."""
PENDING = 64  # maximum number of unread pairs of GPU events; older ones are dropped


class Results:
    """Launches and results of one worker, in this process; `listeners` are told the result of every step.

    With overlapped scheduling SGLang reads a step's result after it has launched the next step. So a step's time is the
    time from the last result to its own, host work included.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[Step], None]] = []
        self._launched = 0
        self._last: tuple[int, float] = (-1, 0.0)

    def launched(self, result: Any = None, *, context_tokens: int = 0) -> None:
        """Notes the launch of a batch; `result` is SGLang's, None for a prefill."""
        self._launched += 1
        if result is not None:
            setattr(result, _MARK, (self._launched, context_tokens))

    def on_result(self, settle: Callable[..., Any], processor: Any, result: Any, batch: Any) -> Any:
        """Around SGLang's processing of a result: tells the listeners of the requests that SGLang counts.

        Retracted and finished requests are left out. With overlapped scheduling a finished request may be verified once
        more. The time is None if it is not that of the told requests alone.
        """
        live = [i for i, request in enumerate(batch.reqs) if not (request.is_retracted or request.finished())]
        settled = settle(processor, result, batch)
        number, context = getattr(result, _MARK, (-1, 0))
        (last, then), self._last = self._last, (number, perf_counter())
        alone = number > 0 and last == number - 1 and len(live) == len(batch.reqs)
        step = Step(
            [str(batch.reqs[i].rid) for i in live],
            [int(result.speculative_num_draft_tokens)] * len(live),
            [result.num_correct_drafts_per_req_cpu[i] for i in live],
            self._last[1] - then if alone else None,
            context,
        )
        for listener in self.listeners:
            listener(step)
        return settled


RESULTS = Results()  # those of this process: a scheduler has one worker


class SpeculationMetrics:
    """Prometheus metrics of acceptance by slot, of widths, and of the drafter's time.

    Those of whole blocks stand at 0 from the start: where drafts never pay, a dashboard shows 0 and not that data lack.
    """

    def __init__(self, model_name: str, block_size: int) -> None:
        from prometheus_client import Counter, Histogram

        def counter(name: str, about: str, label: str) -> Callable[[int], Any]:  # looking a label up is slow
            made = Counter(name, about, ["model_name", label])
            return cache(lambda value: made.labels(model_name, str(value)))

        self._offered = counter(OFFERED, "Drafted tokens that were verified, by slot of the block.", "slot")
        self._accepted = counter(ACCEPTED, "Drafted tokens that were accepted, by slot of the block.", "slot")
        self._steps = counter(STEPS, "Verifications of one request, by width (the anchor counted).", "width")
        for slot in range(1, block_size):
            self._offered(slot)
            self._accepted(slot)
        self._steps(block_size)
        about = "Time of one drafter pass over a batch."
        self.drafting = Histogram(DRAFT_SECONDS, about, ["model_name"], buckets=SECONDS).labels(model_name)

    def verified(self, step: Step) -> None:
        """Counts a step."""
        requests = len(step.widths)
        if not requests:
            return
        width, passed = step.widths[0], 0
        self._steps(width).inc(requests)
        ended_at = Numbers(step.accepted)
        for slot in range(width - 1, 0, -1):
            passed += ended_at[slot]
            self._offered(slot).inc(requests)
            self._accepted(slot).inc(passed)


def watch(worker: Any) -> None:
    """Attaches metrics to a built worker, on the first rank and if SGLang's metrics are on."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import get_parallel

    settings = resolving_view(worker.server_args)
    if not settings.enable_metrics or get_parallel().tp_rank != 0:
        return
    metrics = SpeculationMetrics(settings.served_model_name, int(settings.speculative_num_draft_tokens or 1))
    RESULTS.listeners.append(metrics.verified)
    runner, report = worker.draft_model_runner, metrics.drafting.observe
    on_gpu = str(worker.device).startswith("cuda")
    runner.forward = _timed_on_gpu(runner.forward, report) if on_gpu else _timed_on_host(runner.forward, report)


def _timed_on_host(forward: Callable[..., Any], report: Callable[[float], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        output = forward(*args, **kwargs)
        report(perf_counter() - start)
        return output

    return call


def _timed_on_gpu(forward: Callable[..., Any], report: Callable[[float], None]) -> Callable[..., Any]:
    import torch

    waiting: deque[tuple[Any, Any]] = deque(maxlen=PENDING)

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
