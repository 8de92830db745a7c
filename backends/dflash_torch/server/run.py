"""The process: load, serve, drain. Exit codes: 0 drained, 1 cut short or broken, 2 a user's mistake."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from types import FrameType

import uvicorn

from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError

from ..engine import EmbeddedEngine
from .app import guarded
from .keys import ApiKeys
from .metrics import Metrics
from .service import Service
from .settings import ServerSettings
from .worker import Worker

log = logging.getLogger(__name__)
TICK = 0.05


class Server(uvicorn.Server):
    """uvicorn with a drain of our own: the listener stays open, and says 503, until the last answer is out."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service, self.exit_code = service, 0
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second stops at once."""
        self._signals += 1
        self.service.draining = True
        if self._signals > 1:
            log.warning("second signal: stopping at once")
            os._exit(1)

    async def main_loop(self) -> None:
        """Until a signal and the end of the drain, or until the engine cannot be started."""
        clock, counter = asyncio.get_running_loop(), 0
        while not (self.service.draining or self._broken()):
            await self.on_tick(counter)
            counter += 1
            await asyncio.sleep(TICK)
        if self._broken():
            self.exit_code = 1
            return
        log.info("draining: %d requests are still to be answered", self.service.worker.admitted)
        deadline = clock.time() + self.service.settings.drain_seconds
        while self.service.worker.admitted and clock.time() < deadline:
            await asyncio.sleep(TICK)
        if self.service.worker.admitted:
            log.warning("the drain's %g seconds are over", self.service.settings.drain_seconds)
            self.exit_code = 1
            await asyncio.to_thread(self.service.worker.stop)  # which tells whoever still waits

    def _broken(self) -> bool:
        return self.service.worker.state == "broken"


def serve(deployment: Deployment, settings: ServerSettings, keys: ApiKeys, listener: socket.socket) -> int:
    """Runs until it is told to stop; returns the exit code.

    Raises:
        UserError: the deployment does not run here.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    model = settings.served_model_name or deployment.target.model
    metrics = Metrics(model)
    worker = Worker(lambda: _start(deployment), metrics, max_queued=deployment.limits.max_queued_requests)
    metrics.watch(worker)
    server = server_of(Service(settings, keys, worker, metrics, model))
    log.info("serving %s on http://%s:%d", model, *listener.getsockname()[:2])
    server.run(sockets=[listener])
    return _outcome(server, worker)


def server_of(service: Service) -> Server:
    """uvicorn around the application, told what this server does itself."""
    settings = service.settings
    config = uvicorn.Config(
        guarded(service),
        http="h11",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=settings.max_header_bytes + 1024,  # the door says what is too large, h11 cuts off
        timeout_graceful_shutdown=2,
    )
    return Server(config, service)


def _start(deployment: Deployment) -> EmbeddedEngine:
    from ..backend import backend

    return backend.engine(deployment)


def _outcome(server: Server, worker: Worker) -> int:
    """A step that is still running must not keep the process alive, and neither must what is left of it."""
    fatal = worker.fatal
    if isinstance(fatal, UserError):
        raise fatal
    if fatal is not None:
        raise _readable(fatal)
    if not worker.stop():
        log.warning("a step is still running; leaving it behind")
        _flush()
        os._exit(1)
    return server.exit_code


def _readable(error: BaseException) -> BaseException:
    """Memory that is not there is a user's business; anything else is ours, traceback and all."""
    text = str(error)
    if isinstance(error, MemoryError) or "allocate" in text or "out of memory" in text:
        do = "lower limits.max_batch_size or limits.max_model_len, or use a smaller model"
        return UserError(f"it does not fit into memory ({text.splitlines()[0] if text else 'out of memory'})", do=do)
    return error


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
