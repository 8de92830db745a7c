"""The thread that owns the engine: it takes requests from the queue between steps, and fills their streams."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from dflash_serve.outputs import Chunk

from ..engine import EmbeddedEngine
from .api_errors import ApiError
from .batch import Batch, Delivery, EngineRequest
from .metrics import EngineSnapshot, ServerMetrics

State = Literal["loading", "ready", "broken", "stopped"]
SHUTTING_DOWN = "the server is shutting down"


class EngineWorker:
    """Continuous batching over one engine. Only its own thread touches the scheduler.

    Args:
        start: loads the engine; runs in the thread, so that the server answers while it loads.
        max_queued: requests that may wait for a cache entry.
    """

    def __init__(self, start: Callable[[], EmbeddedEngine], metrics: ServerMetrics, *, max_queued: int) -> None:
        self._start, self.metrics, self.max_queued = start, metrics, max_queued
        self.engine: EmbeddedEngine | None = None
        self.batch: Batch | None = None
        self.state: State = "loading"
        self.fatal: BaseException | None = None
        """Why the engine could not be loaded."""
        self.admitted = 0
        """Requests taken in and not yet over. Belongs to the event loop."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = threading.Condition()
        self._queue: deque[EngineRequest] = deque()
        self._snapshot = EngineSnapshot()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- called in the event loop

    def launch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the thread; streams are filled in this loop."""
        self._loop = loop
        self._thread.start()

    def has_room(self, requests: int) -> bool:
        """Whether so many more fit into cache and queue."""
        return self.admitted + requests <= self.most_admitted

    @property
    def most_admitted(self) -> int:
        """Cache entries and queue together."""
        assert self.engine is not None
        return self.engine.scheduler.cache.entries + self.max_queued

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Queues requests; there must be room."""
        self.admitted += len(requests)
        with self._changed:
            self._queue.extend(requests)
            self._changed.notify()

    def wake(self) -> None:
        """Lets the thread see that a stream was cancelled."""
        with self._changed:
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
        """Requests in the queue."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self.batch.running) if self.batch else 0

    def snapshot(self) -> EngineSnapshot:
        """Queue and batch as they stand, the rest as it was after the last step."""
        return replace(self._snapshot, waiting=self.waiting, running=self.running)

    # --- the thread

    def _run(self) -> None:
        try:
            self.engine = self._start()
            batch = self.batch = Batch(self.engine, self.metrics)
            batch.warm_up()
        except BaseException as error:  # whoever waits for readiness must hear of it
            self.fatal, self.state = error, "broken"
            return
        self._snapshot, self.state = batch.snapshot(), "ready"
        while self._wait_for_work(batch):
            self._post([*self._drop_queued(), *batch.drop_cancelled()])
            self._join_queued(batch)
            if batch.running:
                self._post(batch.step())
            self._snapshot = batch.snapshot()
            if batch.broken:
                self.state = "broken"
        if self.state == "ready":
            self.state = "stopped"
        left = [(queued.stream, ApiError(503, SHUTTING_DOWN)) for queued in self._queue]
        self._queue.clear()
        self._post([*batch.fail(503, SHUTTING_DOWN), *left])

    def _wait_for_work(self, batch: Batch) -> bool:
        with self._changed:
            while not (self._stopping or self._queue or batch.running):
                self._changed.wait()
            return not self._stopping

    def _drop_queued(self) -> list[Delivery]:
        """Takes cancelled requests out of the queue."""
        with self._changed:
            gone = [queued for queued in self._queue if queued.stream.cancelled]
            for queued in gone:
                self._queue.remove(queued)
        return [(queued.stream, None) for queued in gone]

    def _join_queued(self, batch: Batch) -> None:
        """Moves requests from the queue into the batch while there are free cache entries."""
        while batch.scheduler.free_entries:
            with self._changed:
                if not self._queue or batch.soon_reusable(self._queue[0]):
                    return
                queued = self._queue.popleft()
            self._post(batch.join(queued))

    def _post(self, deliveries: Sequence[Delivery]) -> None:
        """Hands a whole step's chunks to the event loop in one call."""
        assert self._loop is not None
        if deliveries and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, deliveries)

    # --- in the event loop again

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        for stream, item in deliveries:
            if not isinstance(item, Chunk) or item.finish_reason is not None:
                self.admitted -= 1
            if item is not None:
                stream.items.put_nowait(item)
