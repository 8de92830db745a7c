"""A JSON object of a config.json, read with problems instead of errors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from dflash_serve.errors import Problem, did_you_mean

ABSENT = object()
Kind = TypeVar("Kind")
WANTED: Mapping[object, str] = {
    **{float: "a number", bool: "true or false", str: "a string", list[str]: "a list of strings"},
    **{list[float]: "a list of numbers", list[int]: "a list of whole numbers"},
}
"""Types of values -> what messages call them."""
FINITE = ConfigDict(allow_inf_nan=False)  # Python reads NaN and Infinity, which JSON does not have


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
        if self.fallback and outer is not ABSENT and outer != here:
            self.note(f"{self.named(key)} is {here} but {self.fallback.named(key)} is {outer}", "keep the right one")
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

    def given(self, key: str, kind: type[Kind]) -> Kind | None:
        """The value, which must be of this type of `WANTED`; None where the key is absent."""
        value = self.get(key)
        if value is ABSENT:
            return None
        try:
            return TypeAdapter(kind, config=FINITE).validate_python(value, strict=True)
        except ValidationError:
            self._complain(key, value, WANTED[kind])
            return None

    def positive(self, key: str) -> float | None:
        """A number above 0, or None where the key is absent."""
        value = self.given(key, float)
        if value is not None and value <= 0:
            self._complain(key, value, "a positive number")
            return None
        return value

    def either(self, key: str, other_key: str, kind: type[Kind]) -> Kind | None:
        """The value under one of two keys with one meaning; two values that disagree are a problem."""
        one, other = self.given(key, kind), self.given(other_key, kind)
        if one is not None and other is not None and one != other:
            self.note(f"{self.named(key)} is {one} but {self.named(other_key)} is {other}", "keep the right one")
        return other if one is None else one

    @property
    def architectures(self) -> Collection[str]:
        """The names in `architectures`; empty where the key is absent."""
        return self.given("architectures", list[str]) or ()

    def integers(self, key: str, *, minimum: int = 0) -> tuple[int, ...] | None:
        """A non-empty list of integers, or None where the key is absent."""
        values = self.given(key, list[int])
        if values is not None and not (values and min(values) >= minimum):
            self._complain(key, values, f"a list of whole numbers from {minimum} on")
            return None
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
        """Adds a problem for every key that is not in `known`; what is empty says nothing, `_name` is a tool's own."""
        for key in sorted(self.raw.keys() - set(known)):
            if self.raw[key] not in (None, {}, []) and not key.startswith("_"):
                near = did_you_mean(key, known)
                self.note(f"unknown key {self.named(key)} = {self.raw[key]!r}", f"{near} {do}" if near else do)

    def refuse(self, key: str, harmless: Collection[object], why: str, do: str = "") -> None:
        """Adds a problem if the key's value is not one of the harmless ones."""
        value = self.get(key)
        if value is not ABSENT and value not in harmless:
            self.note(f"{self.named(key)} = {value!r}: {why}", do)

    def _complain(self, key: str, value: object, wanted: str) -> None:
        if value is ABSENT:
            self.note(f"no {self.named(key)}", f"add it: {wanted}")
        else:
            self.note(f"{self.named(key)} is {value!r}, not {wanted}", "correct it")
