"""Problem: one thing that is wrong, found before anything starts; and the shape of a target that a drafter must fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_serve.errors import UserError


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


@dataclass(frozen=True)
class TargetShape:
    """What a drafter must know of its target, read from the target's config.json without loading it."""

    name: str
    """As the user gave it; for messages."""
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int | None


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
