"""Tells listeners the result of every step: accepted tokens and the step's time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

_MARK = "_dflash_serve_launch"  # attribute of SGLang's results that has their `Launch`


@dataclass(frozen=True)
class StepResult:
    """A verified step."""

    width: int
    requests: int  # requests in the batch, those included that have ended meanwhile
    accepted: Sequence[tuple[str, int]]  # request ids and their accepted drafted tokens
    seconds: float | None  # time from the last result to this one; None if something else ran in between
    context_tokens: int = 0  # K/V tokens of all requests together, before the step


class StepListener(Protocol):
    """Is told the result of every step."""

    def verified(self, step: StepResult) -> None: ...


@dataclass(frozen=True)
class Launch:
    """A step whose result has not been read."""

    number: int
    context_tokens: int


class Steps:
    """Launches and results of one worker, in this process.

    With overlapped scheduling SGLang reads a step's result after it has launched the next step. So a step's time is the
    time from the last result to its own, host work included.
    """

    def __init__(self) -> None:
        self.listeners: list[StepListener] = []
        self.report_part: Callable[[str, float], None] | None = None
        self.report_alarm: Callable[[bool], None] = lambda _: None
        self._launched = 0
        self._last: tuple[int, float] = (-1, 0.0)

    def launched(self, result: Any = None, *, context_tokens: int = 0) -> None:
        """Notes the launch of a batch; `result` is SGLang's, None for a prefill."""
        self._launched += 1
        if result is not None:
            setattr(result, _MARK, Launch(self._launched, context_tokens))

    def on_result(self, settle: Callable[..., Any], processor: Any, result: Any, batch: Any) -> Any:
        """Around SGLang's processing of a result: tells the listeners of the requests that SGLang counts.

        Retracted and finished requests are left out. With overlapped scheduling a finished request may be verified once
        more.
        """
        live = [i for i, request in enumerate(batch.reqs) if not (request.is_retracted or request.finished())]
        settled = settle(processor, result, batch)
        accepted = [(str(batch.reqs[i].rid), result.num_correct_drafts_per_req_cpu[i]) for i in live]
        launch = getattr(result, _MARK, None)
        seconds = self._seconds(launch.number if launch else None)
        context = launch.context_tokens if launch else 0
        step = StepResult(int(result.speculative_num_draft_tokens), len(batch.reqs), accepted, seconds, context)
        for listener in self.listeners:
            listener.verified(step)
        return settled

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Reports the host time of a part of a step: on a GPU the time to launch it, on a CPU all of it."""
        start = perf_counter()
        try:
            yield
        finally:
            if self.report_part is not None:
                self.report_part(name, perf_counter() - start)

    def _seconds(self, number: int | None) -> float | None:
        now = perf_counter()
        (last, then), self._last = self._last, (-1 if number is None else number, now)
        return now - then if number is not None and last == number - 1 else None


STEPS = Steps()  # the steps of this process: a scheduler has one worker
