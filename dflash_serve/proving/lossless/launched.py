"""A server that the verification starts itself, and stops again whatever happens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dflash_serve.backend import Command, ServerBackend
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.deployment import Deployment, Speculation
from dflash_serve.errors import UserError, raise_problems
from dflash_serve.proving.lossless.sides import EndpointSide, Pair, Side
from dflash_serve.speculation.params import SamplingParams

GRACE = 30.0
"""Seconds from SIGTERM to SIGKILL."""
TAIL = 5
"""Lines of a failed server's log that are shown."""


@dataclass(frozen=True)
class Launcher:
    """How servers of one backend are started.

    Args:
        folder: where each gets a folder of its own, with what it reads and its log.
        patience: seconds until it must answer.
        concurrency: requests in flight.
    """

    backend: ServerBackend
    folder: Path
    patience: float = 1800.0
    concurrency: int = 16

    def pair(self, deployment: Deployment) -> Pair:
        """The deployment with and without its drafter, one at a time.

        Raises:
            UserError: either has a problem.
        """
        plain = deployment.model_copy(update={"drafter": None, "speculation": Speculation()})
        for one in (deployment, plain):
            raise_problems(self.backend.check(one))
        facts = {
            "with": facts_of(self.backend.name, deployment),
            "without": facts_of(self.backend.name, plain),
        }
        return Pair(lambda: self.started(deployment, "with"), lambda: self.started(plain, "without"), facts)

    @contextmanager
    def started(self, deployment: Deployment, name: str) -> Iterator[Side]:
        """A server that answers, until the block ends.

        Raises:
            UserError: it cannot be started, ends by itself, or does not answer in time.
        """
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.prepare(deployment, folder)
        port = _free_port()
        command = self.backend.command(deployment, folder, port=port)
        log = folder / "server.log"
        process = _start(command, log)
        try:
            endpoint = Endpoint(f"http://127.0.0.1:{port}", concurrency=self.concurrency)
            _wait(process, endpoint, log, self.patience)
            yield EndpointSide(endpoint)
        finally:
            _stop(process)


def new_folder() -> Path:
    """A temporary one for servers' files and logs; it stays, for whoever wants to read them."""
    return Path(tempfile.mkdtemp(prefix="dflash-serve-verify-"))


def facts_of(backend: str, deployment: Deployment) -> dict[str, str | None]:
    """What a report says of a deployment."""
    drafter = deployment.drafter
    return {
        "backend": backend,
        "target": deployment.target.model,
        "drafter": drafter.model if drafter else None,
        "width": str(deployment.speculation.width) if drafter else "off",
        "deployment": deployment.model_dump_json(exclude_defaults=True),
    }


def _start(command: Command, log: Path) -> subprocess.Popen[bytes]:
    """In a session of its own, so that its children can be stopped with it."""
    with log.open("ab") as out:
        try:
            return subprocess.Popen(  # noqa: S603
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **command.env},
                start_new_session=True,
            )
        except OSError as error:
            do = "install what the backend needs"
            raise UserError(f"cannot be started ({error.strerror})", where=command.argv[0], do=do) from None


def _wait(process: subprocess.Popen[bytes], endpoint: Endpoint, log: Path, patience: float) -> None:
    """Until it has answered a request: engines listen before they are ready."""
    end = time.monotonic() + patience
    ready = Endpoint(endpoint.url, timeout=60.0)
    one_token = SamplingParams(temperature=0, max_tokens=1)
    while time.monotonic() < end:
        if process.poll() is not None:
            what = f"the server ended with exit code {process.returncode}{_tail(log)}"
            raise UserError(what, where=str(log), do="read its log")
        with suppress(UserError):
            ready.complete("Hello", one_token)
            return
        time.sleep(0.5)
    raise UserError(f"the server does not answer after {patience:g} s{_tail(log)}", where=str(log), do="read its log")


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return ": " + " | ".join(lines[-TAIL:]) if lines else ""


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Politely, then not; its children go with it."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
