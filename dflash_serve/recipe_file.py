"""Recipes are YAML files in which ${NAME} is the environment's: one rule for all of them.

Values are filled in after the file was parsed, so that no value can change its structure.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from dflash_serve.deployment import read_yaml
from dflash_serve.errors import UserError

VARIABLE = re.compile(r"\$\{(\w+)(:-([^}]*))?\}")


def read_recipe_file(path: Path) -> object:
    """What the file holds. ${NAME} must be set, ${NAME:-text} need not; a value left empty counts as not given.

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
