"""The thread that owns the engine: takes tickets in between steps, and sends their news to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from ..engine import EmbeddedEngine
from .batch import Batch, Entry
from .metrics import Metrics
from .ticket import Failure, News, Part, Ticket

State = Literal["loading", "ready", "broken", "stopped"]
SHUTTING_DOWN = "the server is shutting down"


class Worker:
    """Continuous batching over one engine. Only its own thread touches the scheduler.

    Args:
        start: loads the engine; runs in the thread, so that the server answers while it loads.
        max_queued: parts that may wait for a slot.
    """

    def __init__(self, start: Callable[[], EmbeddedEngine], metrics: Metrics, *, max_queued: int) -> None:
        self._start, self.metrics, self.max_queued = start, metrics, max_queued
        self.engine: EmbeddedEngine | None = None
        self.batch: Batch | None = None
        self.state: State = "loading"
        self.fatal: BaseException | None = None
        self.admitted = 0
        """Parts taken in and not yet over. Belongs to the event loop."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Ticket, Part]] = deque()
        self._stopping = False
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
        """KVCacheManager and queue together."""
        assert self.engine is not None
        return self.engine.scheduler.cache.entries + self.max_queued

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
        return len(self.batch.seats) if self.batch else 0

    # --- the thread

    def _run(self) -> None:
        try:
            self.engine = self._start()
            self.batch = Batch(self.engine, self.metrics)
            self.batch.warm_up()
        except BaseException as error:  # whoever waits for readiness must hear of it
            self.fatal, self.state = error, "broken"
            return
        self.state = "ready"
        while self._wait_for_work(self.batch):
            self._post([*self._drop_waiting(), *self.batch.drop_cancelled()])
            self._seat_waiting(self.batch)
            if self.batch.seats:
                self._post(self.batch.step())
            if self.batch.broken:
                self.state = "broken"
        if self.state == "ready":
            self.state = "stopped"
        left = [(ticket, Failure(SHUTTING_DOWN, 503)) for ticket, _ in self._waiting]
        self._waiting.clear()
        self._post([*self.batch.fail(SHUTTING_DOWN, 503), *left])

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _wait_for_work(self, batch: Batch) -> bool:
        with self._changed:
            while not (self._stopping or self._waiting or batch.seats):
                self._changed.wait()
            return not self._stopping

    def _drop_waiting(self) -> list[Entry]:
        with self._changed:
            gone = [entry for entry in self._waiting if entry[0].cancelled]
            for entry in gone:
                self._waiting.remove(entry)
        return [(ticket, None) for ticket, _ in gone]

    def _seat_waiting(self, batch: Batch) -> None:
        while batch.scheduler.free_entries:
            with self._changed:
                if not self._waiting or batch.soon_reusable(*self._waiting[0]):
                    return
                ticket, part = self._waiting.popleft()
            self._post(batch.join(ticket, part))

    def _post(self, news: Sequence[Entry]) -> None:
        """Hands news to the event loop, one call for a whole step."""
        assert self._loop is not None
        if news and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, news)

    # --- in the event loop again

    def _deliver(self, news: Sequence[Entry]) -> None:
        for ticket, item in news:
            if not isinstance(item, News) or item.ended is not None:
                self.admitted -= 1
            if item is not None:
                ticket.events.put_nowait(item)
