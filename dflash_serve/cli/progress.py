"""Progress of a long command on stderr: one line that changes on a terminal; elsewhere, as in a log, many lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from rich.console import Console
from rich.text import Text

TERMINAL_SECONDS, LINE_SECONDS = 1.0, 20.0  # Between two looks on a terminal, and between two lines elsewhere


@contextmanager
def progress_shown(describe: Callable[[], str], *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Shows until the block ends what `describe` says; another thread calls it. Gives a function that prints a line."""
    console, over = Console(stderr=True, quiet=quiet, highlight=False, markup=False, emoji=False), Event()
    with console.status(Text(describe())) as status:

        def look() -> None:
            while not over.wait(TERMINAL_SECONDS if console.is_terminal else LINE_SECONDS):
                if console.is_terminal:
                    status.update(Text(describe()))
                else:
                    console.print(describe(), soft_wrap=True)

        thread = Thread(target=look, daemon=True)
        thread.start()
        try:
            yield lambda line: console.print(line, soft_wrap=True)
        finally:
            over.set()
            thread.join()
