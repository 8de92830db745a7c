"""What a dialect is: one published way of writing a drafter down."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.dialects.section import ConfigSection
from dflash_serve.errors import UserError


@dataclass(frozen=True)
class Target:
    """What a config.json may say of the target beyond DrafterConfig; None and empty = not known."""

    name: str | None = None
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dialect:
    """Reads and writes one config.json dialect. Tensors have the same names in all of them."""

    name: str
    matches: Callable[[ConfigSection], bool]
    read: Callable[[ConfigSection, bool], dict[str, object]]
    """(config.json, whether the weights bring a mask embedding) -> DrafterConfig's fields; problems are noted."""
    write: Callable[[DrafterConfig, Target], dict[str, object]]
    """UserError where the dialect has no words for the drafter."""
    copies_of_target: frozenset[str] = field(default_factory=frozenset)
    """Tensors that merely repeat the target's, and are skipped."""


def one_value(values: Set[object], what: str, dialect: str) -> object:
    """The single value of a set; None of an empty one.

    Raises:
        UserError: there are several, which the dialect cannot say.
    """
    if len(values) > 1:
        raise inexpressible(f"layers with different {what} ({', '.join(map(str, sorted(values, key=str)))})", dialect)
    return next(iter(values), None)


def inexpressible(what: str, dialect: str) -> UserError:
    """The error for a drafter that a dialect cannot describe."""
    return UserError(f"the {dialect} dialect has no way to write {what}", where="--to", do="choose another dialect")
