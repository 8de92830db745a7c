"""YAML files that a user wrote: read, filled in, and the first mistake in them as one line."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dflash_serve.errors import UserError, did_you_mean

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
    except UnicodeDecodeError:
        raise UserError("not UTF-8 text", where=str(path)) from None
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


def describe(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """The first mistake pydantic found, in one line.

    Args:
        model: what was read; with it, an unknown key is told the one that was probably meant.
    """
    first = first_mistake(error)
    parts = [str(part) for part in first["loc"] if not str(part).startswith(("constrained", "literal", "int"))]
    field = ".".join(parts)
    if first["type"] == "extra_forbidden":
        hint = did_you_mean(parts[-1], _keys(model, parts[:-1]), prefix="".join(f"{part}." for part in parts[:-1]))
        return "; ".join(part for part in (f"unknown key {field}", hint) if part)
    return f"{field}: {first['msg'].removeprefix('Value error, ')} (given: {first['input']!r})"


def first_mistake(error: ValidationError) -> ErrorDetails:
    """An unknown key before anything else: a missing one is often the same, misspelt."""
    found = error.errors()
    return next((one for one in found if one["type"] == "extra_forbidden"), found[0])


def fields_below(field: FieldInfo) -> Mapping[str, FieldInfo] | None:
    """The keys of a section; None where the field is a plain value."""
    kinds = (field.annotation, *get_args(field.annotation))
    sections = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return next((section.model_fields for section in sections), None)


def _keys(model: type[BaseModel] | None, path: Sequence[str]) -> list[str]:
    """The keys that a model has at a place."""
    fields: Mapping[str, FieldInfo] | None = model.model_fields if model else None
    for part in path:
        fields = fields_below(fields[part]) if fields and part in fields else None
    return list(fields or ())
