"""ConfigSection: one JSON object of a config.json, read key by key. What is wrong is noted, and reading goes on."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dflash_serve.errors import Problem

ABSENT = object()


class ConfigSection:
    """A JSON object whose lookups may fall back to an outer one, and which collects problems instead of raising.

    A getter returns a harmless stand-in for a value it had to complain about, so that one reading finds every problem;
    whoever reads must look at `problems` before using what was read. A JSON null is the same as an absent key.
    """

    def __init__(
        self,
        raw: Mapping[str, object],
        where: str,
        problems: list[Problem],
        *,
        path: str = "",
        fallback: ConfigSection | None = None,
    ) -> None:
        self.raw, self.where, self.problems = raw, where, problems
        self.path, self.fallback = path, fallback

    def note(self, what: str, do: str = "") -> None:
        """Adds a problem of this file."""
        problem = Problem(what, self.where, do)
        if problem not in self.problems:  # a key may be read more than once
            self.problems.append(problem)

    def named(self, key: str) -> str:
        """The key as a user finds it in the file: `dflash_config.block_size`."""
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
        """Whether the key is given, here or in the fallback."""
        return self.raw.get(key) is not None or (self.fallback is not None and self.fallback.has(key))

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer of at least `minimum`; without a default it must be there."""
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
        value = self.get(key)
        if value is ABSENT:
            return None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        self._complain(key, value, "a number")
        return None

    def flag(self, key: str) -> bool | None:
        """true or false, or None where the key is absent."""
        value = self.get(key)
        if value is ABSENT or isinstance(value, bool):
            return value if isinstance(value, bool) else None
        self._complain(key, value, "true or false")
        return None

    def text(self, key: str) -> str | None:
        """A string, or None where the key is absent."""
        value = self.get(key)
        if value is ABSENT or isinstance(value, str):
            return value if isinstance(value, str) else None
        self._complain(key, value, "a string")
        return None

    def integers(self, key: str, *, minimum: int = 0) -> tuple[int, ...] | None:
        """A non-empty list of integers, or None where the key is absent."""
        value = self.get(key)
        if value is ABSENT:
            return None
        if isinstance(value, list) and value and all(type(item) is int and item >= minimum for item in value):
            return tuple(value)
        self._complain(key, value, f"a list of whole numbers from {minimum} on")
        return None

    def numbers(self, key: str) -> tuple[float, ...] | None:
        """A list of numbers, or None where the key is absent."""
        value = self.get(key)
        if value is ABSENT:
            return None
        if isinstance(value, list) and all(type(item) in (int, float) for item in value):
            return tuple(float(item) for item in value)
        self._complain(key, value, "a list of numbers")
        return None

    def strings(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None where the key is absent."""
        value = self.get(key)
        if value is ABSENT:
            return None
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        self._complain(key, value, "a list of strings")
        return None

    def section(self, key: str, *, falls_back: bool = False) -> ConfigSection:
        """The object under `key` (empty where absent), optionally with lookups that fall back to this one."""
        value = self.get(key)
        if value is not ABSENT and not isinstance(value, dict):
            self._complain(key, value, "an object")
        raw = value if isinstance(value, dict) else {}
        fallback = self if falls_back else None
        return ConfigSection(raw, self.where, self.problems, path=self.named(key), fallback=fallback)

    def only(self, known: Collection[str], do: str) -> None:
        """Notes every key of this object that is not known."""
        for key in sorted(self.raw.keys() - set(known)):
            self.note(f"unknown key {self.named(key)} = {self.raw[key]!r}", do)

    def refuse(self, key: str, harmless: Collection[object], why: str, do: str = "") -> None:
        """Notes the key where its value is not one of the harmless ones."""
        value = self.get(key)
        if value is not ABSENT and value not in harmless:
            self.note(f"{self.named(key)} = {value!r}: {why}", do)

    def _complain(self, key: str, value: object, wanted: str) -> None:
        if value is ABSENT:
            self.note(f"no {self.named(key)}", f"add it: {wanted}")
        else:
            self.note(f"{self.named(key)} is {value!r}, not {wanted}", "correct it")
