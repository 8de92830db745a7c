"""The one reader of YAML and JSON from outside, with limits on size, depth, number of values, and digits.

A file of a stranger may be endless (/dev/zero), as deep as a stack, or a kilobyte of aliases for 10^9 values.
Each is one `UserError`, and what is returned can be walked, compared and printed without another check.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dflash_serve.errors import UserError, first_line


class DocumentLimits(NamedTuple):
    """Largest document that is read."""

    bytes: int
    values: int  # of all depths; an alias counts as often as it stands there
    depth: int = 64


TEXT = DocumentLimits(2**20, 20_000)
"""Files that a person writes: deployments, recipes. PyYAML reads some 10,000 values a second."""
CONFIG = DocumentLimits(16 * 2**20, 500_000)  # config.json: a quantised one may list every module
DATA = DocumentLimits(100_000_000, 20_000_000)
"""Headers and indices of weights (the limit of the safetensors library), reports."""
LARGEST_INTEGER = 2**128
"""transformers writes 10^30, which has 100 bits, as `model_max_length` where a tokenizer has no limit."""
MERGE = "tag:yaml.org,2002:merge"  # `<<`: takes keys of another mapping; may stand several times
INTEGER, FLOAT, TIMESTAMP = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp"))
NUMBERS = {
    INTEGER: r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    FLOAT: r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}
"""Tag -> numbers as YAML 1.2's core schema writes them. PyYAML reads YAML 1.1: 20:48 is 1248 there, and 010 is 8."""
VARIABLE = re.compile(r"\$\{(\w+)(:-([^}]*))?\}")  # ${NAME} or ${NAME:-default} in a recipe


def is_regular(path: Path) -> bool:
    """A file that can be opened without waiting: no pipe, device or socket. Links are followed."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):  # ValueError: a name with a NUL or half a character
        return False


def read_bytes(path: Path, limits: DocumentLimits = TEXT, *, do: str = "", pipes: bool = True) -> bytes:
    """The contents of a file.

    Args:
        pipes: the file may be a pipe or a device, which a user named; else it is refused before it is opened.

    Raises:
        UserError: it cannot be read, or is larger than `limits`.
    """
    try:
        if not pipes and not stat.S_ISREG(path.stat().st_mode):
            raise UserError("not a regular file", where=str(path), do=do)
        with path.open("rb") as file:
            data = file.read(limits.bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL or half a character
        why = getattr(error, "strerror", None) or first_line(error)
        if isinstance(error, FileNotFoundError) and not path.is_absolute():
            why += f", below {Path.cwd()}"
        raise UserError(f"cannot be read ({why})", where=str(path), do=do) from None
    if len(data) > limits.bytes:
        raise UserError(f"larger than {limits.bytes:,} bytes", where=str(path), do=do)
    return data


def read_text(path: Path, limits: DocumentLimits = TEXT, *, do: str = "", pipes: bool = True) -> str:
    """The text of a file without a byte-order mark; raises as `read_bytes`, and for text that is not UTF-8."""
    try:
        return read_bytes(path, limits, do=do, pipes=pipes).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError("not valid: not UTF-8 text", where=str(path), do=do) from None


def read_json(path: Path, limits: DocumentLimits = DATA, *, do: str = "") -> Any:
    """The contents of a JSON file; a pipe or a device is refused, as it may never end.

    Raises:
        UserError: it cannot be read, is not JSON, or exceeds the limits.
    """
    return parse_json(read_text(path, limits, do=do, pipes=False), limits, where=str(path), do=do)


def parse_json(text: str, limits: DocumentLimits = DATA, *, where: str, do: str = "") -> Any:
    """The value of a JSON text; raises as `read_json`."""
    try:
        return _within(json.loads(text, object_pairs_hook=_object), limits)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not valid JSON ({_reason(error)})", where=where, do=do) from None


def read_yaml(path: Path) -> object:
    """The contents of a YAML file; raises as `read_json`."""
    loader = None
    try:
        loader = _Loader(read_text(path))
        return _within(loader.get_single_data(), TEXT)
    # The others come out of PyYAML's constructors: 2026-13-45, 0x_, a key in its own value.
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError, LookupError, AttributeError, TypeError) as error:
        raise UserError(f"not valid YAML ({_reason(error)})", where=str(path)) from None
    finally:
        if loader is not None:
            loader.dispose()


def read_recipe_file(path: Path) -> object:
    """The contents of a recipe, with environment variables for ${NAME}, which must be set, and ${NAME:-default}.

    Values are inserted after parsing, so that they cannot change the structure; an empty one counts as not given.

    Raises:
        UserError: it cannot be read, is not YAML, or names a variable that is not set.
    """

    def variable(found: re.Match[str]) -> str:
        name, has_default, default = found.groups()
        if name not in os.environ and not has_default:
            raise UserError(f"${{{name}}} is not set", where=str(path), do=f"export {name}=...")
        return os.environ.get(name) or default or ""

    def fill(value: object) -> object:
        if isinstance(value, dict):
            return {key: fill(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [fill(inner) for inner in value]
        if isinstance(value, str) and VARIABLE.search(value):
            return VARIABLE.sub(variable, value) or None
        return value

    return fill(read_yaml(path))


class _Loader(yaml.SafeLoader):
    # Counts what is composed with every alias written out, before merge keys can multiply it.
    depth = values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        alias, before = self.check_event(yaml.AliasEvent), self.values
        self.sizes: dict[int, int] = self.__dict__.get("sizes", {})
        self.depth += 1
        if self.depth > TEXT.depth:
            raise ValueError(f"deeper than {TEXT.depth} levels")
        node = super().compose_node(parent, index)
        self.depth -= 1
        if alias and id(node) not in self.sizes:
            raise ValueError("an alias stands inside its own value")
        self.values += self.sizes[id(node)] if alias else 1
        self.sizes[id(node)] = self.values - before
        if self.values > TEXT.values:
            raise ValueError(f"more than {TEXT.values:,} values")
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[Hashable, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            name, line = self.construct_object(key), key.start_mark.line + 1
            if name in lines:
                raise ValueError(f"the key {name!r} is given twice, in lines {lines[name]} and {line}")
            lines[name] = line
        return node

    def construct_integer(self, node: Any) -> int:
        text = self.construct_scalar(node)
        return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in (INTEGER, FLOAT, TIMESTAMP)]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _numbers in NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(f"(?:{_numbers})$"), [*"-+.0123456789"])
_Loader.add_constructor(INTEGER, _Loader.construct_integer)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r} is given twice")
    return found


def _within(document: Any, limits: DocumentLimits) -> Any:
    """The document; ValueError if it exceeds the limits, or has what cannot be written as JSON and UTF-8."""
    level: list[Any] = [document]
    total = depth = 0
    while level:
        total, depth = total + len(level), depth + 1
        if depth > limits.depth:
            raise ValueError(f"deeper than {limits.depth} levels")
        if total > limits.values:
            raise ValueError(f"more than {limits.values:,} values")
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                for key in value:
                    _check_plain(key)
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
            else:
                _check_plain(value)
        level = below
    return document


def _check_plain(value: Hashable) -> None:
    if isinstance(value, str):
        if not value.isascii():
            value.encode("utf-8")  # ValueError: half a surrogate pair
    elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise ValueError(f"a number of {value.bit_length()} bits")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeEncodeError):
        return "half of a surrogate pair"
    if isinstance(error, yaml.MarkedYAMLError):  # its whole text repeats the lines of the file
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        return f"{error.problem or error.context}{place}"
    return " ".join(str(error).split()) or type(error).__name__
