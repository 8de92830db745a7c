"""Text for a person: a terminal gets its lines broken between words, a pipe or a file gets them whole."""

from __future__ import annotations

import os
import sys
from textwrap import fill
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.table import Table

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


def table(*heads: str, caption: str | None = None) -> Table:
    """A table whose heads and cells break between words where a terminal is narrow; no head is cut.

    Once it has its rows, `keep_names` does the same for the cells of its first column.
    """
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, caption=caption)
    for head in heads:
        made.add_column(head, min_width=max(map(len, head.split()), default=0))
    return made


def keep_names(made: Table) -> Table:
    """Lets no word of the first column's cells be cut; returns the table."""
    names = made.columns[0]
    longest = max((len(word) for cell in names.cells for word in str(cell).split()), default=0)
    names.min_width = max(longest, names.min_width or 0)
    return made


def _broken(line: str, width: int, hang: int) -> str:
    inner = " " * (len(line) - len(line.lstrip()) + hang)
    return fill(line, width, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False)


def _columns(stream: TextIO) -> int:
    try:
        return max(NARROWEST, int(os.environ.get("COLUMNS") or os.get_terminal_size(stream.fileno()).columns))
    except (OSError, ValueError):
        return 80
