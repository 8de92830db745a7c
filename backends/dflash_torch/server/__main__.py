"""`python -m dflash_torch.server deployment.json`: what `dflash-serve serve` becomes. Settings come by environment.

Exit codes: 0 drained, 1 cut short or broken, 2 a user's mistake.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from pydantic import ValidationError

from dflash_serve.common.yaml_file import describe
from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError

from ..facts import SETTINGS_PREFIX
from .settings import ApiKeys, ServerSettings

if TYPE_CHECKING:
    from ..engine import EmbeddedEngine
    from .handler import RequestHandler
    from .worker import EngineWorker

log = logging.getLogger(__name__)
TICK_SECONDS = 0.05


class DrainingServer(uvicorn.Server):
    """uvicorn with a drain of our own: the listener stays open, and says 503, until the last answer is out."""

    def __init__(self, config: uvicorn.Config, handler: RequestHandler) -> None:
        super().__init__(config)
        self.handler, self.exit_code = handler, 0
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second stops at once."""
        self._signals += 1
        self.handler.draining = True
        if self._signals > 1:
            log.warning("second signal: stopping at once")
            os._exit(1)

    async def main_loop(self) -> None:
        """Runs until a signal and the end of the drain, or until the engine cannot be started."""
        clock, worker, ticks = asyncio.get_running_loop(), self.handler.worker, 0
        while not self.handler.draining and worker.state != "broken":
            await self.on_tick(ticks)
            ticks += 1
            await asyncio.sleep(TICK_SECONDS)
        if worker.state == "broken":
            self.exit_code = 1
            return
        log.info("draining: %d requests are still to be answered", worker.admitted)
        deadline = clock.time() + self.handler.settings.drain_seconds
        while worker.admitted and clock.time() < deadline:
            await asyncio.sleep(TICK_SECONDS)
        if worker.admitted:
            log.warning("the drain's %g seconds are over", self.handler.settings.drain_seconds)
            self.exit_code = 1
            await asyncio.to_thread(worker.stop)  # which tells whoever still waits


def main() -> None:
    """A user's mistake is one line on stderr and exit code 2."""
    try:
        deployment = Deployment.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
        settings = _settings()
        keys, listener = ApiKeys.read(settings.api_key_file), bind(settings.host, settings.port)
        code = serve(deployment, settings, keys, listener)
    except UserError as error:
        print(f"dflash-serve: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, before anything slow is done.

    Raises:
        UserError: the address is taken, not ours, or not to be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        do = "choose another with --port, or stop what has it"
        raise UserError(f"cannot listen ({error.strerror})", where=f"{host}:{port}", do=do) from None
    listener.setblocking(False)
    return listener


def serve(deployment: Deployment, settings: ServerSettings, keys: ApiKeys, listener: socket.socket) -> int:
    """Runs until it is told to stop; returns the exit code.

    Raises:
        UserError: the deployment does not run here.
    """
    from .handler import RequestHandler  # these import torch, after what can be wrong with the settings
    from .metrics import ServerMetrics
    from .worker import EngineWorker

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    model = settings.served_model_name or deployment.target.model
    metrics = ServerMetrics(model)
    worker = EngineWorker(lambda: _start(deployment), metrics, max_queued=deployment.limits.max_queued_requests)
    metrics.watch(worker.snapshot)
    server = server_of(RequestHandler(settings, keys, worker, metrics, model))
    log.info("serving %s on http://%s:%d", model, *listener.getsockname()[:2])
    server.run(sockets=[listener])
    return _exit_code(server, worker)


def server_of(handler: RequestHandler) -> DrainingServer:
    """uvicorn around the application, told what this server does itself."""
    from sse_starlette.sse import AppStatus

    from .app import admitting_app

    AppStatus.enable_automatic_graceful_drain = False  # it would cut streams at SIGTERM; our drain lets them end
    settings = handler.settings
    config = uvicorn.Config(
        admitting_app(handler),
        http="h11",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=settings.max_header_bytes + 1024,  # h11 cuts off beyond
        timeout_graceful_shutdown=2,
    )
    return DrainingServer(config, handler)


def _settings() -> ServerSettings:
    try:
        return ServerSettings()
    except ValidationError as error:
        raise UserError(describe(error), where=f"{SETTINGS_PREFIX}*") from None


def _start(deployment: Deployment) -> EmbeddedEngine:
    from ..backend import backend

    return backend.engine(deployment)


def _exit_code(server: DrainingServer, worker: EngineWorker) -> int:
    """A step that is still running must not keep the process alive, and neither must what is left of it."""
    fatal = worker.fatal
    if isinstance(fatal, UserError):
        raise fatal
    if fatal is not None:
        raise _readable(fatal)
    if not worker.stop():
        log.warning("a step is still running; leaving it behind")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    return server.exit_code


def _readable(error: BaseException) -> BaseException:
    """Memory that is not there is a user's business; anything else is ours, traceback and all."""
    text = str(error)
    if isinstance(error, MemoryError) or "allocate" in text or "out of memory" in text:
        do = "lower limits.max_batch_size or limits.max_model_len, or use a smaller model"
        return UserError(f"it does not fit into memory ({text.splitlines()[0] if text else 'out of memory'})", do=do)
    return error


if __name__ == "__main__":
    main()
