"""The servers that a test has started: their memory, their gauges, and how one is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil


def kill(*words: str) -> None:
    """Kills a server of this process by words of its command line, as a machine that fails does."""
    (found,) = (one for one in psutil.Process().children() if _holds(one, words))
    os.killpg(found.pid, signal.SIGKILL)


def _holds(process: psutil.Process, words: Sequence[str]) -> bool:
    line = process.cmdline()
    return any(line[at : at + len(words)] == list(words) for at in range(len(line)))


def gigabytes() -> float:
    """Memory of all processes that this one has started, shared pages counted once."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / 2**30


def settled(read: Callable[[], float | None], value: float, patience: float = 60.0) -> bool:
    """True once a gauge has a value; False if it does not within `patience` seconds."""
    end = time.monotonic() + patience
    while read() != value:
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True
