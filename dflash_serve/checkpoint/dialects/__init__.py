"""A dialect: one published way of describing a drafter in config.json. The registry is `reader.DIALECTS`.

`ConfigSection` reads a JSON object key by key; it collects problems and goes on reading.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from dflash_serve.checkpoint.config import PLAIN_DRAFTER, DrafterConfig
from dflash_serve.errors import Problem, UserError

ABSENT = object()
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class ConfigSection:
    """A JSON object whose lookups may fall back to an outer one, and which collects problems instead of raising.

    A getter adds a problem for a wrong value and returns a harmless one, so that one reading finds every problem. The
    caller must look at `problems` before it uses the values. A JSON null counts as an absent key.
    """

    raw: Mapping[str, object]
    where: str
    problems: list[Problem]
    path: str = ""
    fallback: ConfigSection | None = None

    def note(self, what: str, do: str = "") -> None:
        """Adds a problem of this file."""
        problem = Problem(what, self.where, do)
        if problem not in self.problems:  # a key may be read more than once
            self.problems.append(problem)

    def named(self, key: str) -> str:
        """Path of the key in the file, such as `dflash_config.block_size`."""
        if self.fallback is not None and self.raw.get(key) is None and self.fallback.has(key):
            return self.fallback.named(key)
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str) -> object:
        """The value here, else in the fallback, else ABSENT. Two values that disagree are a problem."""
        here = self.raw.get(key)
        outer = self.fallback.get(key) if self.fallback else ABSENT
        if here is None:
            return outer
        if outer is not ABSENT and outer != here:
            assert self.fallback is not None
            self.note(
                f"{self.named(key)} is {here} but {self.fallback.named(key)} is {outer}",
                "keep the right one",
            )
        return here

    def has(self, key: str) -> bool:
        """The key is given, here or in the fallback."""
        return self.raw.get(key) is not None or (self.fallback is not None and self.fallback.has(key))

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer of at least `minimum`; without a default it is required."""
        value = self.get(key)
        if value is ABSENT and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
            return value
        self._complain(key, value, f"a whole number from {minimum} on")
        return minimum

    def optional_integer(self, key: str, *, minimum: int = 1) -> int | None:
        """An integer, or None where the key is absent."""
        return None if self.get(key) is ABSENT else self.integer(key, minimum=minimum)

    def number(self, key: str, default: float) -> float:
        """A number."""
        value = self.optional_number(key)
        return default if value is None else value

    def optional_number(self, key: str) -> float | None:
        """A number, or None where the key is absent."""
        return self._given(key, float, "a number")

    def flag(self, key: str) -> bool | None:
        """true or false, or None where the key is absent."""
        return self._given(key, bool, "true or false")

    def text(self, key: str) -> str | None:
        """A string, or None where the key is absent."""
        return self._given(key, str, "a string")

    def integers(self, key: str, *, minimum: int = 0) -> tuple[int, ...] | None:
        """A non-empty list of integers, or None where the key is absent."""
        wanted = f"a list of whole numbers from {minimum} on"
        values = self._given(key, list[int], wanted)
        if values is not None and not (values and min(values) >= minimum):
            self._complain(key, values, wanted)
            return None
        return None if values is None else tuple(values)

    def numbers(self, key: str) -> tuple[float, ...] | None:
        """A list of numbers, or None where the key is absent."""
        values = self._given(key, list[float], "a list of numbers")
        return None if values is None else tuple(values)

    def strings(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None where the key is absent."""
        values = self._given(key, list[str], "a list of strings")
        return None if values is None else tuple(values)

    def section(self, key: str, *, falls_back: bool = False) -> ConfigSection:
        """The object under `key` (empty where absent), optionally with lookups that fall back to this one."""
        value = self.get(key)
        if value is not ABSENT and not isinstance(value, dict):
            self._complain(key, value, "an object")
        raw = value if isinstance(value, dict) else {}
        fallback = self if falls_back else None
        return ConfigSection(raw, self.where, self.problems, path=self.named(key), fallback=fallback)

    def only(self, known: Collection[str], do: str) -> None:
        """Adds a problem for every key of this object that is not in `known`."""
        for key in sorted(self.raw.keys() - set(known)):
            self.note(f"unknown key {self.named(key)} = {self.raw[key]!r}", do)

    def refuse(self, key: str, harmless: Collection[object], why: str, do: str = "") -> None:
        """Adds a problem if the key's value is not one of the harmless ones."""
        value = self.get(key)
        if value is not ABSENT and value not in harmless:
            self.note(f"{self.named(key)} = {value!r}: {why}", do)

    def _given(self, key: str, kind: type[Kind], wanted: str) -> Kind | None:
        value = self.get(key)
        if value is ABSENT:
            return None
        try:
            return TypeAdapter(kind).validate_python(value, strict=True)
        except ValidationError:
            self._complain(key, value, wanted)
            return None

    def _complain(self, key: str, value: object, wanted: str) -> None:
        if value is ABSENT:
            self.note(f"no {self.named(key)}", f"add it: {wanted}")
        else:
            self.note(f"{self.named(key)} is {value!r}, not {wanted}", "correct it")


@dataclass(frozen=True)
class Dialect:
    """Reader and writer of one dialect of config.json. Tensor names are equal in all dialects."""

    name: str
    matches: Callable[[ConfigSection], bool]
    read: Callable[[ConfigSection, Collection[str]], dict[str, object]]
    """(config.json, names of the stored tensors) -> fields of a DrafterConfig; faults become problems."""
    write: Callable[[DrafterConfig, str | None], dict[str, object]]
    """(drafter, the target's name if known) -> config.json; UserError if the dialect cannot describe the drafter."""
    copies_of_target: frozenset[str] = frozenset()  # names of tensors that repeat the target's and are skipped


def one_value(values: Set[object], what: str, dialect: str) -> object:
    """The single value of a set; None for an empty set.

    Raises:
        UserError: there are several, which the dialect cannot describe.
    """
    if len(values) > 1:
        raise inexpressible(f"layers with different {what} ({', '.join(map(str, sorted(values, key=str)))})", dialect)
    return next(iter(values), None)


def inexpressible(what: str, dialect: str) -> UserError:
    """The error for a drafter that a dialect cannot describe."""
    return UserError(f"the {dialect} dialect has no way to write {what}", where="--to", do="choose another dialect")


def refuse_other_attention(config: ConfigSection) -> None:
    """Adds problems for attention that is not supported."""
    config.refuse("attention_sink_bias", (False,), "attention sinks are not supported yet", PLAIN_DRAFTER)
    config.refuse("add_swa_attention_sink_bias", (False,), "attention sinks are not supported yet", PLAIN_DRAFTER)
    config.refuse("attention_value_scale", (1,), "scaled attention values are not supported yet", PLAIN_DRAFTER)
    kinds = ("dflash", "dspark", "dflash2")
    config.refuse("projector_type", kinds, "only DFlash, DFlash2 and DSpark are supported", PLAIN_DRAFTER)
