"""YAML files that a user wrote: read, filled in, and the first mistake in them as one line."""

from __future__ import annotations

import os
import re
from pathlib import Path

import yaml
from pydantic import ValidationError

from dflash_serve.errors import UserError

VARIABLE = re.compile(r"\$\{(\w+)(:-([^}]*))?\}")


def read_yaml(path: Path) -> object:
    """What a YAML file holds.

    Raises:
        UserError: it cannot be read, or is not YAML.
    """
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=str(path)) from None
    except yaml.YAMLError as error:
        raise UserError(f"not valid YAML ({' '.join(str(error).split())})", where=str(path)) from None


def read_recipe_file(path: Path) -> object:
    """What a recipe holds, ${NAME} in it being the environment's: it must be set, but for ${NAME:-text}.

    Values are filled in after parsing, so that none can change the structure; one left empty counts as not given.

    Raises:
        UserError: it cannot be read, is not YAML, or names a variable that is not set.
    """
    return _fill(read_yaml(path), path)


def _fill(value: object, path: Path) -> object:
    if isinstance(value, dict):
        return {key: _fill(inner, path) for key, inner in value.items()}
    if isinstance(value, list):
        return [_fill(inner, path) for inner in value]
    if isinstance(value, str) and VARIABLE.search(value):
        return VARIABLE.sub(lambda found: _variable(found, path), value) or None
    return value


def _variable(found: re.Match[str], path: Path) -> str:
    name, has_default, default = found.groups()
    if has_default:
        return os.environ.get(name) or default
    if name not in os.environ:
        raise UserError(f"${{{name}}} is not set", where=str(path), do=f"export {name}=...")
    return os.environ[name]


def describe(error: ValidationError) -> str:
    """The first mistake pydantic found, in one line."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("constrained", "literal", "int")))
    if first["type"] == "extra_forbidden":
        return f"unknown key {field}"
    return f"{field}: {first['msg'].removeprefix('Value error, ')} (given: {first['input']!r})"
