"""Children that never outlive us, with all that they started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

GRACE_SECONDS = 20


@contextmanager
def ended(child: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """When the block is left, whatever the reason, the child's whole group is gone.

    The child must have been started with `start_new_session`.
    """
    try:
        yield child
    finally:
        _signal(child, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
        _signal(child, signal.SIGKILL)
        child.wait()


def _signal(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM stops us the way Ctrl-C does, so that children are ended and what is finished is told."""

    def stop(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
