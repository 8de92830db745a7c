"""Settings of a user, as frozen pydantic models: read from YAML, environment variables and flags, and merged.

Priority: flag > environment > YAML > the model's defaults. The first mistake becomes one `UserError` that says where it
stands.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from dflash_serve.common.documents import read_yaml
from dflash_serve.errors import UserError, did_you_mean

ENV_PREFIX = "DFLASH_SERVE_"
NESTED = "__"  # Separator of a section and its key in the name of an environment variable
VARIABLE = re.compile(r"\$\{(\w+)(:-([^}]*))?\}")  # ${NAME} or ${NAME:-default} in a recipe
PositiveInt = Annotated[int, Field(gt=0)]
Settings = TypeVar("Settings", bound=BaseModel)


class Frozen(BaseModel):
    """Base of every description that is read from a file: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


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


def describe(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """The first mistake that pydantic found, in one line.

    Args:
        model: the model that was read; with it, a similar key is suggested for an unknown one.
    """
    first = _first_mistake(error)
    parts = [str(part) for part in first["loc"] if not str(part).startswith(("constrained", "literal", "int"))]
    field = ".".join(parts)
    if first["type"] == "extra_forbidden":
        hint = did_you_mean(parts[-1], _keys(model, parts[:-1]), prefix="".join(f"{part}." for part in parts[:-1]))
        return "; ".join(part for part in (f"unknown key {field}", hint) if part)
    return f"{field}: {first['msg'].removeprefix('Value error, ')} (given: {first['input']!r})"


def _first_mistake(error: ValidationError) -> ErrorDetails:
    # The first unknown key, else the first error: a missing key is often an unknown one, misspelt.
    found = error.errors()
    return next((one for one in found if one["type"] == "extra_forbidden"), found[0])


def _fields_below(field: FieldInfo) -> Mapping[str, FieldInfo] | None:
    # The keys of a section; None if the field is a plain value.
    kinds = (field.annotation, *get_args(field.annotation))
    sections = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return next((section.model_fields for section in sections), None)


def _keys(model: type[BaseModel] | None, path: Sequence[str]) -> list[str]:
    fields: Mapping[str, FieldInfo] | None = model.model_fields if model else None
    for part in path:
        fields = _fields_below(fields[part]) if fields and part in fields else None
    return list(fields or ())


def merged_settings(
    model: type[Settings], path: Path | None, flags: Mapping[str, Any], *, start: str, others: Sequence[str] = ()
) -> Settings:
    """The settings by priority: flag > environment > YAML > the model's defaults.

    Args:
        path: a YAML file, or None.
        flags: nested; None values count as not given.
        start: first line of a correct file, for the message about a file that is not a mapping.
        others: other variables of ours, without the prefix. A variable with a similar name is refused.

    Raises:
        UserError: a file that cannot be read, an unknown key or an impossible value (the first one).
    """
    refuse_misspelt(ENV_PREFIX, {*_variables(model), *others}, "names no key of the deployment")
    described = read_yaml(path) if path else {}
    if not isinstance(described, dict):
        raise UserError("not a mapping", where=str(path), do=f"start with `{start}`")
    environment, given = _environment(model), overlay({}, flags)
    try:
        return model.model_validate(overlay(overlay(overlay({}, described), environment), given))
    except ValidationError as error:
        # The source of the first mistake: the layer of highest priority that has the key.
        place = [str(part) for part in _first_mistake(error)["loc"]]
        where = str(path or "deployment")
        if _has(given, place):
            where = "command line"
        elif _has(environment, place):
            where = ENV_PREFIX + NESTED.join(place[:2]).upper()
        raise UserError(describe(error, model), where=where) from None


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, key by key; its None values count as not given."""
    out = dict(base)
    for key, value in over.items():
        if value is None:
            continue
        nested = isinstance(value, Mapping)
        below = out.get(key)
        out[key] = overlay(below if isinstance(below, Mapping) else {}, value) if nested else value
        if nested and not out[key]:
            del out[key]
    return out


def _environment(model: type[BaseModel]) -> dict[str, Any]:
    config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_nested_delimiter=NESTED, extra="ignore")
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in model.model_fields.items()}
    lender = create_model("Environment", __base__=BaseSettings, **fields)
    lender.model_config = SettingsConfigDict(**{**BaseSettings.model_config, **config})
    found: dict[str, Any] = EnvSettingsSource(lender)()
    return found


def refuse_misspelt(prefix: str, known: Collection[str], what: str = "names no setting") -> None:
    """Refuses variables of a prefix that name nothing known and are similar to a known name, or have `__`.

    A misspelt variable would silently have no effect. Others may have another origin: Kubernetes makes
    DFLASH_SERVE_PORT of a service's name.

    Args:
        known: names without the prefix; one that ends in `__` may have any continuation.

    Raises:
        UserError: the first such variable.
    """
    sections = tuple(one for one in known if one.endswith(NESTED))
    for variable in sorted(name for name in map(str.upper, os.environ) if name.startswith(prefix)):
        name = variable.removeprefix(prefix)
        if name in known or name.startswith(sections):
            continue
        hint = did_you_mean(name, sorted({*known} - {*sections}), prefix=prefix)
        if hint or NESTED in name:
            raise UserError(what, where=variable, do=hint or "unset it")


def _variables(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name.upper()
        below = _fields_below(field)
        yield from (f"{name}{NESTED}{key}".upper() for key in below or ())
        if below is None and "dict" in str(field.annotation):
            yield f"{name}{NESTED}".upper()


def _has(layer: Any, place: list[str]) -> bool:
    for part in place:
        if not isinstance(layer, Mapping):
            return True
        if part not in layer:
            return False
        layer = layer[part]
    return True
