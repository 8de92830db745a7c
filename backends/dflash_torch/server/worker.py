"""The thread that owns the engine: takes tickets in between steps, and sends their news to the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from time import monotonic
from typing import Literal

from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics

from ..answer import Answer
from ..engine import EmbeddedEngine
from ..sequence import Sequence
from ..verdict import Gain
from .metrics import Metrics
from .ticket import Failure, News, Part, Ticket

log = logging.getLogger(__name__)

State = Literal["loading", "ready", "broken", "stopped"]
Entry = tuple[Ticket, News | Failure | None]
"""What happened to a part of a ticket; None = it was cancelled and is gone."""
MAX_FAILED_STEPS = 8
"""So many failed steps without a good one between them: the engine is broken, and only a new process helps."""


class _Seat:
    """A part that is running, and when it last had news."""

    def __init__(self, ticket: Ticket, answer: Answer) -> None:
        self.ticket, self.answer, self.last = ticket, answer, 0.0


class Worker:
    """Continuous batching over one engine. Only its own thread touches the decoder.

    Args:
        start: loads the engine; runs in the thread, so that the server answers while it loads.
        max_queued: parts that may wait for a slot.
    """

    def __init__(self, start: Callable[[], EmbeddedEngine], metrics: Metrics, *, max_queued: int) -> None:
        self._start, self.metrics, self.max_queued = start, metrics, max_queued
        self.engine: EmbeddedEngine | None = None
        self.state: State = "loading"
        self.fatal: BaseException | None = None
        self.admitted = 0
        """Parts taken in and not yet over. Belongs to the event loop."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Ticket, Part]] = deque()
        self._seats: dict[int, _Seat] = {}
        self._stopping = False
        self._failed_steps = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- called in the event loop

    def launch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the thread; its news goes to this loop."""
        self._loop = loop
        self._thread.start()

    def room_for(self, parts: int) -> bool:
        """Whether so many more fit into slots and queue."""
        return self.admitted + parts <= self.most_admitted

    @property
    def most_admitted(self) -> int:
        """Slots and queue together."""
        assert self.engine is not None
        return self.engine.decoder.store.slots + self.max_queued

    def submit(self, ticket: Ticket) -> None:
        """Queues all parts of a ticket; there must be room."""
        ticket.wake = self._wake
        self.admitted += len(ticket.parts)
        with self._changed:
            self._waiting.extend((ticket, part) for part in ticket.parts)
            self._changed.notify()

    def stop(self, timeout: float = 5.0) -> bool:
        """Ends the thread after its step; False = it is still at it."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Parts without a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Parts with one."""
        return len(self._seats)

    # --- the thread

    def _run(self) -> None:
        try:
            self.engine = self._start()
            _warm_up(self.engine)
        except BaseException as error:  # whoever waits for readiness must hear of it
            self.fatal, self.state = error, "broken"
            return
        self.state = "ready"
        while self._wait_for_work():
            self._drop_cancelled()
            self._seat_waiting()
            if self._seats:
                self._step()
        self.state = "stopped"
        self._fail_running("the server is shutting down")
        self._post([(ticket, Failure("the server is shutting down", 503)) for ticket, _ in self._waiting])

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._stopping or self._waiting or self._seats):
                self._changed.wait()
            return not self._stopping

    def _drop_cancelled(self) -> None:
        assert self.engine is not None
        with self._changed:
            gone = [entry for entry in self._waiting if entry[0].cancelled]
            for entry in gone:
                self._waiting.remove(entry)
        self._post([(ticket, None) for ticket, _ in gone])
        for sequence in [s for s in self.engine.decoder.running if self._seats[s.id].ticket.cancelled]:
            self.engine.decoder.leave(sequence)
            self._post([(self._seats.pop(sequence.id).ticket, None)])
            self.metrics.ended("abort")

    def _seat_waiting(self) -> None:
        assert self.engine is not None
        decoder = self.engine.decoder
        while decoder.free_slots:
            with self._changed:
                if not self._waiting:
                    return
                ticket, part = self._waiting.popleft()
            try:
                sequence = decoder.join(part.token_ids, part.params, grammar=part.grammar, salt=ticket.salt)
            except Exception as error:
                log.exception("a request could not join")
                self._post([(ticket, Failure(str(error), 400 if isinstance(error, UserError) else 500))])
                continue
            answer = Answer(part.index, sequence, self.engine.tokenizer.backend_tokenizer)
            self._seats[sequence.id] = _Seat(ticket, answer)
            self.metrics.joined(sequence, monotonic() - ticket.arrived)

    def _step(self) -> None:
        assert self.engine is not None
        try:
            gains = self.engine.decoder.step()
        except Exception:
            log.exception("a step failed: its %d requests fail with it, the server goes on", len(self._seats))
            self._fail_running("the step that held this request failed; the server goes on, send it again")
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                self.state = "broken"
            return
        self._failed_steps = 0
        self._post([news for gain in gains if (news := self._news(gain)) is not None])

    def _news(self, gain: Gain) -> Entry | None:
        """What a step brought one part, and its end where it has one."""
        assert self.engine is not None
        sequence = gain.sequence
        seat = self._seats[sequence.id]
        try:
            chunk = seat.answer.advance(gain)
        except Exception:
            log.exception("an answer could not be turned into text")
            sequence.failure = "the answer could not be turned into text"
        if sequence.failure is None and chunk.finish_reason is None and not chunk.token_ids:
            return None  # still in its prompt
        if sequence.failure is not None or chunk.finish_reason is not None:
            del self._seats[sequence.id]
            if sequence in self.engine.decoder.running:  # a stop string, which the decoder does not know of
                self.engine.decoder.leave(sequence)
        self._observe(seat, sequence, len(gain.token_ids))
        if sequence.failure is not None:
            return seat.ticket, Failure(sequence.failure)
        return seat.ticket, News(chunk, sequence if chunk.finish_reason else None)

    def _observe(self, seat: _Seat, sequence: Sequence, tokens: int) -> None:
        now = monotonic()
        if seat.last:
            self.metrics.tokens(tokens, now - seat.last)
        else:
            self.metrics.first_token(tokens, now - seat.ticket.arrived)
        seat.last = now
        if sequence.finish_reason or sequence.failure:
            self.metrics.ended(sequence.finish_reason or "error", now - seat.ticket.arrived)

    def _fail_running(self, message: str) -> None:
        assert self.engine is not None
        decoder = self.engine.decoder
        for sequence in list(decoder.running):
            decoder.leave(sequence, sound=False)
        failed, self._seats = list(self._seats.values()), {}
        for _ in failed:
            self.metrics.ended("error")
        self._post([(seat.ticket, Failure(message)) for seat in failed])

    def _post(self, news: Many[Entry]) -> None:
        """Hands news to the event loop, one call for a whole step."""
        assert self._loop is not None
        if news:
            self._loop.call_soon_threadsafe(self._deliver, news)

    # --- in the event loop again

    def _deliver(self, news: Many[Entry]) -> None:
        for ticket, item in news:
            if not isinstance(item, News) or item.ended is not None:
                self.admitted -= 1
            if item is not None:
                ticket.events.put_nowait(item)


def _warm_up(engine: EmbeddedEngine) -> None:
    """One short answer before the server says it is ready: what is slow or broken shows now."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    list(engine.stream([[0, 1]], [params]))
    engine.decoder.statistics = AcceptanceStatistics()
    engine.decoder.slots.holds.clear()
