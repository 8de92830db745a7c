"""The server's process, `python -m dflash_torch.server deployment.json`, with settings in the environment.

Exit codes: 0 = drained, 1 = cut short or broken, 2 = a user's mistake, 130 = interrupted before it served.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
from collections.abc import Sequence
from errno import EADDRNOTAVAIL
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from dflash_serve.adapter.checks import uses_drafter
from dflash_serve.common.extras import need
from dflash_serve.common.files import remove_temporary
from dflash_serve.common.http import read_keys
from dflash_serve.common.json_log import JsonFormatter, make_stderr_unfailing
from dflash_serve.common.progress import doing, shown
from dflash_serve.common.settings import describe, refuse_misspelt
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError, first_line

from ..facts import MODULES, SETTINGS_PREFIX
from ..launch import choose_waiting, readable, require_gpu, with_operators
from .settings import ServerSettings

if TYPE_CHECKING:
    from ..engine import EmbeddedEngine
    from .app import DrainingServer
    from .worker import EngineWorker

log = logging.getLogger(__package__)  # not `__main__`, as it is started


def main() -> None:
    """Runs the server. A user's mistake is one line on stderr and exit code 2."""
    make_stderr_unfailing()
    try:
        deployment = Deployment.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
        remove_temporary(Path(sys.argv[1]).parent)
        settings = _settings()
        keys = read_keys(str(settings.api_key_file)) if settings.api_key_file else []
        need("serve", *MODULES)
        choose_waiting()  # before torch is there
        require_gpu(deployment)  # before a client can connect
        listener = bind(settings.host, settings.port)
        code = serve(deployment, settings, keys, listener)
    except UserError as error:
        print(f"dflash-serve: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:  # before the server takes signals
        code = 130
    sys.exit(code)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        UserError: the address is taken or cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, UnicodeError) as error:  # UnicodeError: of a name that is too long
        listener.close()
        foreign = isinstance(error, socket.gaierror | UnicodeError) or error.errno == EADDRNOTAVAIL
        do = (
            "give an address of this machine as --host"
            if foreign
            else "choose another with --port, or stop what has it"
        )
        why = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"cannot listen ({why})", where=f"{host}:{port}", do=do) from None
    listener.setblocking(False)
    return listener


def serve(deployment: Deployment, settings: ServerSettings, keys: Sequence[str], listener: socket.socket) -> int:
    """Serves until a signal or a broken engine; returns the exit code.

    Raises:
        UserError: the deployment does not run here.
    """
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    model = settings.served_model_name or deployment.target.model
    log.info("loading %s; requests are answered with 503 until a line says that it is ready", model)
    with shown(log=log.info), doing("loading PyTorch"):
        from .app import server_of
        from .routes import RequestHandler
        from .worker import EngineWorker

    deployment = with_operators(deployment, settings.operators)
    if settings.swap_from is not None and not uses_drafter(deployment):
        raise UserError("no drafter is served", where="swap-from", do="name a drafter, or leave it out")
    worker = EngineWorker(lambda: _start(deployment), model, max_queued=deployment.limits.max_queued_requests)
    server = server_of(RequestHandler(settings, worker), keys)
    server.run(sockets=[listener])
    return _exit_code(server, worker)


def _settings() -> ServerSettings:
    refuse_misspelt(SETTINGS_PREFIX, [name.upper() for name in ServerSettings.model_fields])
    try:
        return ServerSettings()
    except ValidationError as error:
        raise UserError(describe(error), where=f"{SETTINGS_PREFIX}*") from None


def _start(deployment: Deployment) -> EmbeddedEngine:
    from ..backend import backend
    from ..swapping import trim

    engine = backend.engine(deployment)
    # A full collection looks at all that the start made: 0.14 to 0.42 s (measured), between two steps.
    gc.collect()
    gc.freeze()
    trim()  # loading and measuring have freed memory that would stay with the process
    return engine


def _exit_code(server: DrainingServer, worker: EngineWorker) -> int:  # ends the process even where a step still runs
    fatal = worker.fatal
    if isinstance(fatal, UserError):
        raise fatal
    if fatal is not None:
        raise readable(fatal)
    if not worker.stop():
        doing = "the engine still loads" if worker.state == "loading" else "a step is still running"
        log.warning("%s; leaving it behind", doing)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    return server.exit_code


if __name__ == "__main__":
    main()
