"""What a user is meant to read: a mistake as one line, and problems found before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches


class UserError(Exception):
    """A mistake in what the user gave us: shown as one line, exit code 2 (or HTTP 400), never as a traceback.

    Args:
        what: the fault, with the two values that disagree.
        where: the file, tensor, flag or field it was found in.
        do: what the user can do about it.
    """

    def __init__(self, what: str, *, where: str = "", do: str = "") -> None:
        self.what, self.where, self.do = what, where, do
        parts = [f"{where}: {what}" if where else what, do]
        super().__init__("; ".join(part for part in parts if part))


@dataclass(frozen=True)
class Problem:
    """What is wrong (with the two values that disagree), where it was found, and what the user can do."""

    what: str
    where: str = ""
    do: str = ""

    def __str__(self) -> str:
        return str(self.error())

    def error(self) -> UserError:
        """The same as an error to raise."""
        return UserError(self.what, where=self.where, do=self.do)


def did_you_mean(given: str, known: Iterable[str], *, prefix: str = "") -> str:
    """ "did you mean X?" for the nearest of the known names, shown with `prefix` before it; "" where none is near."""
    near = get_close_matches(given, list(known), n=1, cutoff=0.7)
    return f"did you mean {prefix}{near[0]}?" if near else ""


def first_line(error: Exception) -> str:
    """What an error of somebody else's says, in one line; its type where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def raise_problems(problems: Sequence[Problem], *, hint: str = "") -> None:
    """Does nothing where there are none.

    Raises:
        UserError: the first problem; where there are more, their number and `hint`, which says how to see them all.
    """
    if not problems:
        return
    first = problems[0]
    if len(problems) == 1:
        raise first.error()
    more = f"and {len(problems) - 1} more" + (f" ({hint})" if hint else "")
    raise UserError(first.what, where=first.where, do="; ".join(part for part in (first.do, more) if part))


IN_ONE_MESSAGE = 8
"""Problems that `refuse` tells of, at most."""


def refuse(problems: Iterable[Problem]) -> None:
    """Ends an engine's server that starts, in which our code is a guest; where there are no problems, nothing happens.

    Raises:
        ValueError: the problems.
    """
    found = list(problems)
    if found:
        more = [f"(and {len(found) - IN_ONE_MESSAGE} more)"] if len(found) > IN_ONE_MESSAGE else []
        raise ValueError("dflash-serve: " + "\n".join([*map(str, found[:IN_ONE_MESSAGE]), *more]))
