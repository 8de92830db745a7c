"""Errors and problems for users: each is one line that says what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

LONGEST = 600  # characters of one part of a message: a path of 300 and as many words
MOST_LINES = 20  # problems that are printed
CLOSE = 0.8
"""Similarity (difflib's ratio) from which a name is taken as a spelling of another: `widht` and `width` have 0.8,
`a100` and `h100` 0.75, `dgx-b200` and `gb200` 0.77.
"""


class UserError(Exception):
    """A mistake in the user's input: shown as one line with exit code 2 (or HTTP 400), never as a traceback.

    Args:
        what: the fault, with the two values that disagree.
        where: the file, tensor, flag or field it was found in.
        do: the remedy.
    """

    def __init__(self, what: str, *, where: str = "", do: str = "") -> None:
        self.what, self.where, self.do = what, where, do = shown(what), shown(where), shown(do)
        parts = [f"{self.where}: {self.what}" if where else self.what, self.do]
        super().__init__("; ".join(part for part in parts if part))

    def problem(self) -> Problem:
        return Problem(self.what, self.where, self.do)


@dataclass(frozen=True)
class Problem:
    """A fault that was found before anything starts; fields as of `UserError`."""

    what: str
    where: str = ""
    do: str = ""

    def __post_init__(self) -> None:
        for name in ("what", "where", "do"):
            object.__setattr__(self, name, shown(getattr(self, name)))

    def __str__(self) -> str:
        return str(self.error())

    def error(self) -> UserError:
        return UserError(self.what, where=self.where, do=self.do)


def shown(text: str) -> str:
    """The text on one line of at most `LONGEST` characters: what a terminal would obey is escaped, the middle is cut.

    Values of a file stand in messages; a newline or an escape sequence in them must not look like ours. What was shown
    once stays as it is: a `Problem` becomes an error, and an error a `Problem`.
    """
    length = len(text)
    if length > LONGEST:  # before escapes make it longer
        text = text[:LONGEST] + text[-LONGEST:]
    if not text.isprintable():
        text = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    if len(text) <= LONGEST:
        return text
    cut = f"... ({length:,} characters) ..."
    half = (LONGEST - len(cut)) // 2
    return f"{text[:half]}{cut}{text[-half:]}"


def listed(problems: Sequence[Problem]) -> list[str]:
    """The lines of at most `MOST_LINES` problems, and the number of the others."""
    more = len(problems) - MOST_LINES
    return [*map(str, problems[:MOST_LINES]), *([f"and {more:,} more"] if more > 0 else [])]


def did_you_mean(given: str, known: Iterable[str], *, prefix: str = "") -> str:
    """ "did you mean X?" for the most similar known name, shown with `prefix` before it; "" if none is close.

    A name with other digits is another size or version, not a spelling: 70B is never corrected to 1B. Digits that stand
    in another order, or that were left out altogether, are a spelling.
    """
    if len(given) > LONGEST:
        return ""
    digits = _digits(given)
    alike = [one for one in known if not digits or digits == _digits(one)]
    swapped = [one for one in alike if sorted(one) == sorted(given)]  # `heml` for `helm`
    near = swapped or get_close_matches(given, alike, n=1, cutoff=CLOSE)
    return f"did you mean {prefix}{near[0]}?" if near else ""


def _digits(name: str) -> list[str]:
    return sorted(filter(str.isdigit, name))


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


def refuse(problems: Iterable[Problem]) -> None:
    """Ends the start of an engine's server, in which our code is a plug-in, if there are problems.

    Raises:
        ValueError: the problems.
    """
    found = list(problems)
    if found:
        raise ValueError("dflash-serve: " + "\n".join(listed(found)))
