"""Arguments that go to an engine's own server as they are: written as its flags, held against its own parser.

A backend brings an `ArgumentTable`: the parser (the installed engine's, or one made from a pinned list of its flags)
and the flags that keys of the Deployment stand for.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from dflash_serve.deployment.description import Serving
from dflash_serve.errors import Problem, UserError, did_you_mean, first_line, shown

EngineArgs = Mapping[str, JsonValue]
"""Name, without dashes -> value: text or a number, a list for several, true for a flag that stands alone."""
TYPES: Mapping[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}


class EngineParser(argparse.ArgumentParser):
    """An engine's flags; what it does not understand is a ValueError, where argparse would end the process."""

    def __init__(self) -> None:
        super().__init__(add_help=False)

    def error(self, message: str) -> Any:
        raise ValueError(message)

    def complaint(self, words: Sequence[str]) -> str | None:
        """The parser's complaint about words of a command line; None where it takes them."""
        for action in self._actions:
            action.required = False
        try:
            self.parse_args(words)
        except ValueError as error:
            return str(error)
        return None

    def flag(self, name: str) -> str | None:
        """The engine's own spelling of a name with dashes or underscores, hidden flags included; None: no such flag."""
        spellings = (f"--{name}", f"--{name.replace('_', '-')}", f"--{name.replace('-', '_')}")
        return next((one for one in spellings if one in self._option_string_actions), None)

    def action(self, name: str) -> argparse.Action | None:
        """The flag of a name, with dashes or underscores; None where there is none."""
        return self._option_string_actions.get(self.flag(name) or "")

    def opposite(self, flag: str) -> str | None:
        """The flag that turns off what `flag` turns on, or on what it turns off; None where there is none.

        Args:
            flag: as the engine spells it. Engines pair `--x` with `--no-x`, and `--enable-x` with `--disable-x`.
        """
        pair = self._option_string_actions[flag]
        if not isinstance(pair, argparse.BooleanOptionalAction):
            return None

        def sets(option: str) -> object:
            told = argparse.Namespace()
            pair(self, told, [], option)
            return getattr(told, pair.dest)

        ours = (option for option, action in self._option_string_actions.items() if action is pair)
        return next((option for option in ours if sets(option) is not sets(flag)), None)

    @property
    def names(self) -> list[str]:
        """Every long name, without dashes."""
        return [option[2:] for option in self._option_string_actions if option.startswith("--")]


@dataclass(frozen=True)
class ArgumentTable:
    """Arguments of an engine's own server, and the keys that stand for some of them."""

    backend: str
    engine: str  # Whose flags they are: `SGLang 0.5.23`
    parser: Callable[[], EngineParser]  # Made when it is needed: an installed engine takes seconds to import
    keys: Mapping[str, str]
    """Flag, as argparse names it (`tp_size`) -> the key of the Deployment that stands for it, or who else sets it."""

    def problems(self, given: EngineArgs) -> list[Problem]:
        """Arguments that this engine does not have, or that a key stands for; where none is, what its parser says."""
        if not given:
            return []
        parser = self.parser()
        found = [problem for name, value in given.items() for problem in self._problems_of(name, value, parser)]
        first = dict[str, str]()
        for name in given:
            action = parser.action(name)
            if action is not None and (before := first.setdefault(action.dest, name)) != name:
                where = f"{self.where}.{name}"
                found.append(Problem(f"the same argument of {self.engine} as {before}", where, "leave one out"))
        if found:
            return found
        complaint = parser.complaint(self.words(given))
        return [Problem(f"{self.engine} refuses them: {complaint}", self.where, "correct it")] if complaint else []

    def words(self, given: EngineArgs) -> list[str]:
        """Words of a command line, each under the engine's own spelling."""
        if not given:
            return []
        parser = self.parser()
        return [word for name, value in given.items() for word in _words(parser, name, value)]

    @property
    def where(self) -> str:
        return f"engine_args.{self.backend}"

    def _problems_of(self, name: str, value: JsonValue, parser: EngineParser) -> Iterator[Problem]:
        where, action = f"{self.where}.{name}", parser.action(name)
        if action is None:
            hint = did_you_mean(name.replace("_", "-"), parser.names) or did_you_mean(name, parser.names)
            yield Problem(f"{self.engine} has no such argument", where, hint or "see the engine's own --help")
        elif action.dest in self.keys:
            key = self.keys[action.dest]
            do = f"leave it out: {key}" if " " in key else f"set {key}"
            yield Problem(f"{action.option_strings[0]} is what dflash-serve sets itself", where, do)
        elif value is None or (isinstance(value, list) and None in value):
            yield Problem("null is no value of an argument of a command line", where, "give a value, or leave it out")


@dataclass(frozen=True)
class ParserNames:
    """An engine's names of the parsers of model families."""

    reasoning: Mapping[str, str]
    tool_call: Mapping[str, str]

    def of(self, serving: Serving) -> Iterator[tuple[str, str, str]]:
        """(key, the family as it was named, the engine's name) of each parser that is asked for."""
        asked = {
            "reasoning_parser": (serving.reasoning_parser, self.reasoning),
            "tool_call_parser": (serving.tool_call_parser, self.tool_call),
        }
        for key, (family, names) in asked.items():
            if family is not None:
                yield key, family, names.get(family, family)


def by_spelling(parser: EngineParser, keys: Mapping[str, str]) -> dict[str, str]:
    """`keys` of an `ArgumentTable` under every long name of their flags, with underscores."""
    known = {name.replace("-", "_"): parser.action(name) for name in parser.names}
    found = {name: keys[action.dest] for name, action in known.items() if action is not None and action.dest in keys}
    return dict(sorted({**keys, **found}.items()))


def parser_problems(
    table: ArgumentTable, serving: Serving, names: ParserNames, flags: Mapping[str, str]
) -> list[Problem]:
    """Parsers of answers that the engine does not have.

    Args:
        flags: key of `serving` -> the engine's flag for it.
    """
    found = []
    for key, family, name in names.of(serving):
        action = table.parser().action(flags[key])
        known = [str(choice) for choice in action.choices] if action and action.choices else None
        if known is not None and name not in known:
            do = did_you_mean(family, known) or f"there are: {', '.join(known)}"
            found.append(Problem(f"{table.engine} has no {key.replace('_', ' ')} {family!r}", f"serving.{key}", do))
    return found


def _words(parser: EngineParser, name: str, value: JsonValue) -> list[str]:
    action, flag = parser.action(name), parser.flag(name) or f"--{name}"
    if value is True and (action is None or action.nargs in (0, "?")):
        return [flag]
    if value is False and action is not None and action.nargs == 0:
        opposite = parser.opposite(flag)
        return [opposite] if opposite else []  # off is what it is unless given
    if isinstance(value, list):
        return [flag, *(_text(one) for one in value)]
    return [flag, _text(value)]


def _text(value: JsonValue) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, dict | list) or value is None else str(value)


def from_words(words: Sequence[str]) -> dict[str, JsonValue]:
    """`engine_args` from the words after `--` on a command line: `--a 1 --b --c=2` -> {a: 1, b: true, c: 2}.

    Raises:
        UserError: a value without a flag before it, or a flag given twice.
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if name in found:
                raise UserError("given twice", where=f"--{name}", do="give it once; several values follow one flag")
            found[name] = [value] if equals else []
        elif not name:
            raise UserError("not a flag", where=word, do="after `--` come the engine's own flags, in their long form")
        else:
            found[name].append(word)
    return {name: values[0] if len(values) == 1 else list(values) or True for name, values in found.items()}


def own_parser(engine: str, build: Callable[[], EngineParser], pinned: Path) -> EngineParser:
    """The installed engine's own parser; the pinned one, and a line on stderr, if it cannot be made.

    SGLang without a GPU fails with whatever error it meets. An engine that cannot be imported is a problem of its own
    (`Releases.problems`).
    """
    try:
        return build()
    except Exception as error:
        why = shown(first_line(error))
        told = f"{engine}'s own parser cannot be made here ({why})"
        print(f"dflash-serve: note: {told}; its arguments are checked against the pinned list", file=sys.stderr)
        return pinned_parser(pinned)


def pinned_parser(path: Path) -> EngineParser:
    """A parser of a pinned list: JSON, a row a flag, its keys the arguments of `add_flag`."""
    parser = EngineParser()
    for row in json.loads(path.read_text(encoding="utf-8")):
        add_flag(parser, **row)
    return parser


def add_flag(
    parser: EngineParser,
    names: Sequence[str],
    dest: str,
    takes: int | str = 1,
    type: str = "str",
    choices: Sequence[str | int] | None = None,
) -> None:
    """Adds a flag as a row of a pinned list describes it.

    Args:
        takes: 0 = it stands alone, 1, or argparse's `?`, `*` and `+`.
    """
    if takes == 0:
        negated = any(name.startswith("--no-") for name in names)
        own = [name for name in names if not name.startswith("--no-")]
        action: Any = argparse.BooleanOptionalAction if negated else "store_true"
        parser.add_argument(*(own if negated else names), dest=dest, action=action)
        return
    nargs = None if takes == 1 else takes
    known = None if choices is None else [TYPES[type](str(choice)) for choice in choices]
    parser.add_argument(*names, dest=dest, nargs=nargs, type=TYPES[type], choices=known)
