"""Errors and problems for users: each is one line that says what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches


class UserError(Exception):
    """A mistake in the user's input: shown as one line with exit code 2 (or HTTP 400), never as a traceback.

    Args:
        what: the fault, with the two values that disagree.
        where: the file, tensor, flag or field it was found in.
        do: the remedy.
    """

    def __init__(self, what: str, *, where: str = "", do: str = "") -> None:
        self.what, self.where, self.do = what, where, do
        parts = [f"{where}: {what}" if where else what, do]
        super().__init__("; ".join(part for part in parts if part))


@dataclass(frozen=True)
class Problem:
    """A fault that was found before anything starts; fields as of `UserError`."""

    what: str
    where: str = ""
    do: str = ""

    def __str__(self) -> str:
        return str(self.error())

    def error(self) -> UserError:
        return UserError(self.what, where=self.where, do=self.do)


def did_you_mean(given: str, known: Iterable[str], *, prefix: str = "") -> str:
    """ "did you mean X?" for the most similar known name, shown with `prefix` before it; "" if none is similar."""
    near = get_close_matches(given, list(known), n=1, cutoff=0.7)
    return f"did you mean {prefix}{near[0]}?" if near else ""


def first_line(error: Exception) -> str:
    """The first line of another library's error; its type if it has no message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def raise_problems(problems: Sequence[Problem], *, hint: str = "") -> None:
    """Raises the first of the problems, if there are any.

    Raises:
        UserError: the first problem, with the number of others and `hint`: the way to see them all.
    """
    if not problems:
        return
    first = problems[0]
    if len(problems) == 1:
        raise first.error()
    more = f"and {len(problems) - 1} more" + (f" ({hint})" if hint else "")
    raise UserError(first.what, where=first.where, do="; ".join(part for part in (first.do, more) if part))


IN_ONE_MESSAGE = 8  # Largest number of problems in the message of `refuse`


def refuse(problems: Iterable[Problem]) -> None:
    """Ends the start of an engine's server, in which our code is a plug-in, if there are problems.

    Raises:
        ValueError: the problems.
    """
    found = list(problems)
    if found:
        more = [f"(and {len(found) - IN_ONE_MESSAGE} more)"] if len(found) > IN_ONE_MESSAGE else []
        raise ValueError("dflash-serve: " + "\n".join([*map(str, found[:IN_ONE_MESSAGE]), *more]))
