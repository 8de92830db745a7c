"""Progress of long work: what runs, how far it is, and how long it will take.

Code that takes long says so by `doing`, and needs nothing from its caller. `shown` shows it while a verb or a server
works: on a terminal one line that changes, in a log a line now and then. Without `shown` nothing is written.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# Work that is over sooner is not told in a log.
FIRST_SECONDS = 2.0
# Time between two lines of a log about the same work.
LINE_SECONDS = 15.0
TICK_SECONDS = 0.5


class Work:
    """Something that takes long.

    Args:
        what: what is done, such as "measuring step times".
        of: how many parts it has; a float is the whole of a share that `done` has, None = not known.
        before: parts that an earlier run did.
    """

    def __init__(self, what: str, of: float | None = None, before: float = 0) -> None:
        self.what, self.of, self.before = what, of, before
        self.done = before
        self.part = ""  # the part that runs now
        self.began, self.told = monotonic(), False

    def advance(self, count: float = 1) -> None:
        """So many more parts are done."""
        self.done += count

    @property
    def seconds(self) -> float:
        return monotonic() - self.began

    @property
    def left(self) -> float | None:
        """Seconds until it ends, by the parts that are done; None = not known."""
        if self.of is None or not self.before < self.done < self.of:
            return None
        return self.seconds / (self.done - self.before) * (self.of - self.done)

    def __str__(self) -> str:
        text = self.what
        if isinstance(self.of, float):
            text += f" ({self.done / self.of:.0%} done)"
        elif self.of is not None and self.done <= self.of:
            text += f" ({self.done:g} of {self.of} done)"
        elif self.of is not None:
            text += f" ({self.done:g} done)"
        return f"{text}: {self.part}" if self.part else text


_under_way: list[Work] = []  # of all threads, the innermost last
_log: Callable[[str], None] | None = None  # of the `shown` that writes lines


@contextmanager
def doing(what: str, of: float | None = None, before: float = 0) -> Iterator[Work]:
    """Work that lasts as long as the block, with the arguments of `Work`. Work inside it is shown behind it."""
    work = Work(what, of, before)
    _under_way.append(work)
    try:
        yield work
        if work.told and _log is not None:
            _log(f"{what}: {_duration(work.seconds)}")
    finally:
        _under_way.remove(work)


@contextmanager
def shown(
    *, quiet: bool = False, console: Console | None = None, log: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Shows all work that is under way, until the block ends.

    Args:
        quiet: nothing is shown.
        console: of stderr, by which the block prints; None = one of its own.
        log: takes a line of a log; None = stderr, where it is a terminal one line that changes.
    """
    if quiet:
        yield
    elif log is None and sys.stderr.isatty():
        with _on_terminal(console):
            yield
    else:
        stderr = sys.stderr  # not what a library's output is redirected to meanwhile
        with _in_log(log or (lambda line: print(line, file=stderr, flush=True))):
            yield


@contextmanager
def _on_terminal(console: Console | None) -> Iterator[None]:
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    spinner = Spinner("dots")

    def line() -> Spinner:
        spinner.update(text=Text(_line(list(_under_way)) or "starting"))
        return spinner

    # What is printed meanwhile is written above the line; stdout keeps its own way where it is no terminal.
    console, redirected = console or Console(file=sys.stderr), sys.stdout.isatty()
    with Live(get_renderable=line, console=console, transient=True, redirect_stdout=redirected):
        yield


@contextmanager
def _in_log(log: Callable[[str], None]) -> Iterator[None]:
    global _log  # one process has one log
    before, _log, ended = _log, log, threading.Event()
    last = 0.0

    def look() -> None:
        nonlocal last
        works = list(_under_way)
        known = [work for work in works if work.seconds >= FIRST_SECONDS]
        if all(work.told for work in known) and (not known or monotonic() - last < LINE_SECONDS):
            return
        last = monotonic()
        log(_line(works))
        for work in known:
            work.told = True

    def watch() -> None:
        while not ended.wait(TICK_SECONDS):
            look()

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _log = before


def _line(works: list[Work]) -> str:
    if not works:
        return ""
    text = f"{': '.join(map(str, works))}, {_duration(works[-1].seconds)} so far"
    left = next((work.left for work in works if work.left is not None), None)
    return text if left is None else f"{text}, about {_duration(left)} left"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
