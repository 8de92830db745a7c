"""A server on a real socket, in a thread of this process, so that tests can look inside and break things."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dflash_serve.common.http import read_keys
from dflash_torch.engine import EmbeddedEngine
from dflash_torch.server.__main__ import bind
from dflash_torch.server.app import DrainingServer, server_of
from dflash_torch.server.routes import RequestHandler
from dflash_torch.server.settings import ServerSettings
from dflash_torch.server.worker import EngineWorker

MODEL = "tiny"


@dataclass
class Running:
    """A server that answers."""

    url: str
    handler: RequestHandler
    server: DrainingServer
    engine: EmbeddedEngine

    @property
    def worker(self) -> EngineWorker:
        return self.handler.worker

    def idle(self) -> bool:
        """Nothing admitted, nothing queued or running, every cache entry free."""
        scheduler = self.engine.scheduler
        entries_back = len(scheduler.free_entries) == scheduler.cache.entries and not scheduler.running
        return self.worker.admitted == 0 and self.worker.running == 0 and self.worker.waiting == 0 and entries_back


@contextmanager
def running(
    engine: EmbeddedEngine, *, start: Callable[[], EmbeddedEngine] | None = None, queue: int = 32, **settings: Any
) -> Iterator[Running]:
    """Serves an engine until the block ends; `start` replaces how it is loaded."""
    worker = EngineWorker(start or (lambda: engine), MODEL, max_queued=queue)
    chosen = ServerSettings(port=0, **settings)
    keys = read_keys(str(chosen.api_key_file)) if chosen.api_key_file else []
    server = server_of(RequestHandler(chosen, worker), keys)
    listener = bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread.start()
    try:
        if start is None:
            until(lambda: worker.state == "ready")
        yield Running(url, server.handler, server, engine)
    finally:
        server.handler.draining = True
        thread.join(20)
        assert not thread.is_alive()


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits for a condition that must come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)
