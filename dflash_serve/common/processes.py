"""Servers and other commands that this process starts, and always ends before it ends itself."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from dflash_serve.common.http import page_status
from dflash_serve.common.progress import doing
from dflash_serve.errors import UserError

PATIENCE_SECONDS = 3600.0  # Time until a server must be ready; large models take long to load and compile
GRACE_SECONDS = 30.0  # Time from SIGTERM to SIGKILL
TAIL = 5  # Lines of a failed server's log that are shown


@contextmanager
def running(argv: Sequence[str], log: Path, *, env: Mapping[str, str], ready: str, patience: float) -> Iterator[None]:
    """Runs a server from when its `ready` page answers 200; ends it and its children with the block, also on errors.

    Args:
        log: its output is appended there.
        env: its whole environment.
        patience: seconds until it must be ready.

    Raises:
        UserError: the server cannot be started, ends by itself, or is not ready in time.
    """
    process = _start(argv, log, env)
    try:
        with doing(f"starting the server whose log is {log}"):
            _wait(process, ready, log, patience)
        yield
    finally:
        _stop(process)


def require_program(argv: Sequence[str], backend_name: str) -> None:
    """Checks that a command can be started.

    Raises:
        UserError: the program, or the module that Python would run, is not installed here.
    """
    if missing := missing_program(argv):
        do = f"start it where --backend {backend_name} is installed, or look at it with `serve --dry-run`"
        raise UserError("not installed in this environment", where=missing, do=do)


def missing_program(argv: Sequence[str]) -> str | None:
    """The program of a command, or the module that Python would run, where it is not installed here; else None."""
    module = argv[2].partition(".")[0] if len(argv) > 2 and argv[1] == "-m" else None
    there = find_spec(module) is not None if module else shutil.which(argv[0]) is not None
    return None if there else module or argv[0]


def run_command(argv: Sequence[str], log: Path, *, env: Mapping[str, str]) -> int:
    """Runs a command and returns its exit code; an interrupt also ends the command and its children.

    Args:
        log: its output is appended there.
        env: its whole environment.

    Raises:
        UserError: it cannot be started.
    """
    process = _start(argv, log, env)
    try:
        return process.wait()
    finally:
        _stop(process)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, so that children are ended and results printed, as after Ctrl-C."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start(argv: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # In a new session, so that its children can be ended with it.
    with log.open("ab") as out:
        try:
            return subprocess.Popen(  # noqa: S603 - argv, no shell
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            do = "install what the backend needs"
            raise UserError(f"cannot be started ({error.strerror})", where=argv[0], do=do) from None


def _wait(process: subprocess.Popen[bytes], ready: str, log: Path, patience: float) -> None:
    # By the deep probe: engines listen long before they can answer.
    end = time.monotonic() + patience
    while page_status(ready) != 200:
        if process.poll() is not None:
            what = f"the server ended with exit code {process.returncode}{_tail(log)}"
            raise UserError(what, where=str(log), do="read its log")
        if time.monotonic() > end:
            raise UserError(f"the server is not ready after {patience:g} s{_tail(log)}", where=str(log))
        time.sleep(0.2)


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return ": " + " | ".join(lines[-TAIL:]) if lines else ""


def _stop(process: subprocess.Popen[bytes]) -> None:
    # SIGTERM to the server, which may finish requests; after GRACE_SECONDS, SIGKILL to all its processes.
    try:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    finally:  # a second Ctrl-C cuts the grace short
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """A TCP port of this machine without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
