"""Results of every step, for Prometheus and for the width policy, which decides for a whole batch. Needs no SGLang."""

from __future__ import annotations

from collections import Counter as Numbers
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import compress
from time import perf_counter
from types import MappingProxyType
from typing import Any

from dflash_serve.adapter.counters import PaceCounters, SlotCounters
from dflash_serve.adapter.last_run import pace_of
from dflash_serve.speculation.policy import Step, WidthPolicy
from dflash_sglang.facts import DRAFT_SECONDS

from .refusals import own_width

_MARK = "_dflash_serve_launch"  # attribute of SGLang's results: number of the launch, and context tokens
SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0)
"""Upper bounds of the histogram's buckets."""
UNWRITTEN = 16
"""Steps after which counts are written. Each of some 30 counters takes 2 us (a file that processes share)."""


class Results:
    """Launches and results of one worker, in this process.

    `listeners` are told every step, and which of its requests go on. With overlapped scheduling SGLang reads a step's
    result after it has launched the next step. So a step's time is the time from the last result to its own, host work
    included.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[Step, list[str]], None]] = []
        self._launched = 0
        self._last: tuple[int, float] = (-1, 0.0)

    def launched(self, result: Any = None, *, context_tokens: int = 0) -> None:
        """Notes the launch of a batch; `result` is SGLang's, None for a prefill."""
        self._launched += 1
        if result is not None:
            setattr(result, _MARK, (self._launched, context_tokens))

    def on_result(self, process: Callable[..., None], processor: Any, batch: Any, result: Any) -> None:
        """Around SGLang's processing of a result: tells the listeners of the requests that SGLang counts.

        They are told afterwards: the tokens are on their way, and it is known which requests have ended. Retracted and
        finished requests are left out. With overlapped scheduling a finished request may be verified once more. The
        time is None if it is not that of the told requests alone.
        """
        counted = [not (request.is_retracted or request.finished()) for request in batch.reqs]
        process(processor, batch, result)
        live = list(compress(batch.reqs, counted))
        number, context = getattr(result, _MARK, (-1, 0))
        (last, then), self._last = self._last, (number, perf_counter())
        width = result.speculative_num_draft_tokens
        widths = [min(width, own_width(request) or width) for request in live]
        # A request with a narrower width of its own has as many rows as the others.
        alone = number > 0 and last == number - 1 and all(counted) and widths == [width] * len(live)
        step = Step(
            [request.rid for request in live],
            widths,
            list(compress(result.num_correct_drafts_per_req_cpu, counted)),
            self._last[1] - then if alone else None,
            context,
        )
        running = [request.rid for request in live if not request.finished()]
        for listener in self.listeners:
            listener(step, running)


RESULTS = Results()  # those of this process: a scheduler has one worker


class BatchWidths:
    """One width for a whole batch, from a policy that gives each request a width of its own."""

    def __init__(self, policy: WidthPolicy, offered: Collection[int]) -> None:
        self.policy, self.offered = policy, sorted(offered)
        self._ids: list[str] = []  # requests of the last decision
        self._most: Mapping[str, int] = {}  # own widths of requests
        self._ahead: int | None = None  # a decision for them that no launch has taken

    def observe(self, step: Step, running: list[str]) -> None:
        """Takes a step's result, and decides for the requests that go on: the device works now, and waits later."""
        self.policy.observe(step)
        if running:
            self._ahead = self._decided(running, step.context_tokens)

    def choose(
        self, request_ids: list[str], context_tokens: int = 0, most: Mapping[str, int] = MappingProxyType({})
    ) -> int:
        """The width of the coming step: the smallest offered one that is enough for every request.

        Every decoding step of SGLang has all running requests, so those that are not in it have ended.

        Args:
            context_tokens: K/V tokens of all requests together.
            most: own widths of those requests that have one.
        """
        self._most = most
        ahead, self._ahead = self._ahead, None
        return ahead if ahead and self._ids == request_ids else self._decided(request_ids, context_tokens)

    def _decided(self, request_ids: list[str], context_tokens: int) -> int:
        if request_ids != self._ids:
            for ended in set(self._ids).difference(request_ids):
                self.policy.forget(ended)
            self._ids = request_ids
        undraftable = [one for one, most in self._most.items() if most == 1]
        more = (undraftable,) if undraftable else ()
        chosen = self.policy.widths(request_ids, context_tokens, *more)
        asked = [min(width, self._most.get(one, width)) for one, width in zip(request_ids, chosen, strict=False)]
        wanted = max(asked, default=1)
        return next((width for width in self.offered if width >= wanted), self.offered[-1])


class SpeculationMetrics:
    """Prometheus metrics of acceptance by slot, of widths, and of the drafter's time, on the page of SGLang's own.

    Args:
        policy: gives the policy of the widths; None where whole blocks are verified.
    """

    def __init__(
        self, model_name: str, block_size: int, policy: Callable[[], WidthPolicy | None] = lambda: None
    ) -> None:
        from prometheus_client import Histogram

        self._counters, self._pace = (
            SlotCounters(block_size, model_name=model_name),
            PaceCounters(model_name=model_name),
        )
        self._policy = policy
        self._seen, self._unwritten = Numbers[tuple[int, int]](), 0  # (width, accepted drafts), not yet written
        about = "Time of one drafter pass over a batch."
        self.drafting = Histogram(DRAFT_SECONDS, about, ["model_name"], buckets=SECONDS).labels(model_name)

    def verified(self, step: Step, running: list[str]) -> None:
        """Counts a step. Writing is slow, so counts are written after `UNWRITTEN` steps, or when an answer ends."""
        self._seen.update(zip(step.widths, step.accepted, strict=True))
        self._unwritten += 1
        if self._unwritten < UNWRITTEN and len(running) == len(step.widths):
            return
        steps, offered, accepted = Numbers[int](), Numbers[int](), Numbers[int]()
        for (width, passed), times in self._seen.items():
            steps[width] += times
            offered.update(dict.fromkeys(range(1, width), times))
            accepted.update(dict.fromkeys(range(1, passed + 1), times))
        self._counters.count(steps, offered, accepted)
        if (policy := self._policy()) is not None and (pace := pace_of(policy)) is not None:
            self._pace.write(pace.gained, pace.expected)
        self._seen.clear()
        self._unwritten = 0


def _policy_of(worker: Any) -> WidthPolicy | None:
    widths = getattr(worker, "widths", None)  # SGLang's own worker has none
    return widths.policy if isinstance(widths, BatchWidths) else None


def watch(worker: Any) -> None:
    """Attaches metrics to a built worker, if SGLang's are on, on the first of the ranks that have the same requests."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.utils.device_timer import DeviceTimer

    settings, parallel = resolving_view(worker.server_args), get_parallel()
    if not settings.enable_metrics or (parallel.attn_tp_rank, parallel.attn_cp_rank) != (0, 0):
        return
    block_size = int(settings.speculative_num_draft_tokens or 1)
    metrics = SpeculationMetrics(settings.served_model_name, block_size, partial(_policy_of, worker))
    RESULTS.listeners.append(metrics.verified)
    # SGLang gives a timer, which waits for no event, to its other drafters, but not to DFlash's.
    worker.draft_model_runner.device_timer = DeviceTimer(reporter=lambda t, **_: metrics.drafting.observe(t))
