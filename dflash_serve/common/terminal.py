"""Text for a person: a terminal gets its lines broken between words, a pipe or a file gets them whole."""

from __future__ import annotations

import os
import sys
from textwrap import fill
from typing import TextIO

NARROWEST = 20  # Columns; some terminals tell 0


def broken(text: str, *, hang: int = 2, to: TextIO | None = None) -> str:
    """The text as a stream shows it.

    Args:
        hang: columns by which the rest of a broken line stands further in than its beginning.
        to: the stream; None = stdout.
    """
    stream = to or sys.stdout
    if not stream.isatty():
        return text
    width = _columns(stream)
    return "\n".join(line if len(line) <= width else _broken(line, width, hang) for line in text.split("\n"))


def say(text: str, *, hang: int = 2, to: TextIO | None = None) -> None:
    """Prints a text as `broken` makes it."""
    print(broken(text, hang=hang, to=to), file=to or sys.stdout)


def _broken(line: str, width: int, hang: int) -> str:
    inner = " " * (len(line) - len(line.lstrip()) + hang)
    return fill(line, width, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False)


def _columns(stream: TextIO) -> int:
    try:
        return max(NARROWEST, int(os.environ.get("COLUMNS") or os.get_terminal_size(stream.fileno()).columns))
    except (OSError, ValueError):
        return 80
