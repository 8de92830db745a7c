"""Settings of a user as frozen pydantic models: their base, layers of them, and the first mistake in words."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dflash_serve.errors import UserError, did_you_mean

ENV_PREFIX = "DFLASH_SERVE_"
NESTED = "__"  # Separator of a section and its key in the name of an environment variable
PositiveInt = Annotated[int, Field(gt=0)]
Several = Annotated[tuple[str, ...], BeforeValidator(lambda given: given or ())]
"""Values of an option that may be given several times; the command line gives None where it is not given."""


class Frozen(BaseModel):
    """Base of every description that is read from a file: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _take_no_boolean_for_a_number(cls, data: Any) -> Any:
        # YAML reads on, yes, off and no as booleans, which Python takes for 1 and 0. Text makes every number an error.
        if not isinstance(data, Mapping):
            return data
        fields = cls.model_fields
        return {name: _with_words(given, fields[name]) if name in fields else given for name, given in data.items()}


def _with_words(given: Any, field: FieldInfo) -> Any:
    values = given if isinstance(given, list | tuple) else [given]
    if not any(isinstance(value, bool) for value in values):
        return given
    leaves = set(_leaves(field.annotation))
    if given is False and "off" in leaves:
        return "off"
    if leaves & {bool, str} or leaves.isdisjoint((int, float)):
        return given
    words = [f"the boolean {str(value).lower()}" if isinstance(value, bool) else value for value in values]
    return words if values is given else words[0]


def _leaves(annotation: Any) -> Iterator[Any]:
    inner = get_args(annotation)
    if not inner:
        yield annotation
    for one in inner:
        yield from _leaves(one)


def describe(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """The first mistake that pydantic found, in one line.

    Args:
        model: the model that was read; with it, a similar key is suggested for an unknown one.
    """
    first = first_mistake(error)
    parts = [str(part) for part in first["loc"] if not str(part).startswith(("constrained", "literal", "int", "[key]"))]
    field = ".".join(parts)
    if first["type"] == "extra_forbidden":
        hint = did_you_mean(parts[-1], _keys(model, parts[:-1]), prefix="".join(f"{part}." for part in parts[:-1]))
        return "; ".join(part for part in (f"unknown key {field}", hint) if part)
    if first["type"] == "missing":
        return f"{field} is missing"
    if first["type"] == "model_type" and (keys := _keys(model, parts)):
        return f"{field}: not a mapping (given: {first['input']!r}); its keys are {', '.join(keys)}"
    what = first["msg"].removeprefix("Value error, ")
    return f"{field}: {what} (given: {first['input']!r})" if field else what


def first_mistake(error: ValidationError) -> ErrorDetails:
    """The first unknown key, else the first error: a missing key is often an unknown one, misspelt."""
    found = error.errors()
    return next((one for one in found if one["type"] == "extra_forbidden"), found[0])


def fields_below(field: FieldInfo) -> Mapping[str, FieldInfo] | None:
    """The keys of a section; None if the field is a plain value."""
    kinds = (field.annotation, *get_args(field.annotation))
    sections = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return next((section.model_fields for section in sections), None)


def _keys(model: type[BaseModel] | None, path: Sequence[str]) -> list[str]:
    fields: Mapping[str, FieldInfo] | None = model.model_fields if model else None
    for part in path:
        fields = fields_below(fields[part]) if fields and part in fields else None
    return list(fields or ())


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, key by key."""
    out = dict(base)
    for key, value in over.items():
        below = out.get(key)
        out[key] = overlay(below if isinstance(below, Mapping) else {}, value) if isinstance(value, Mapping) else value
    return out


def without_nulls(given: Mapping[str, Any], fields: Mapping[str, FieldInfo]) -> dict[str, Any]:
    """The settings without keys of `fields`, of any depth, whose value is None: they count as not given.

    An unknown key stays, for the model to refuse, and so does a null inside a free mapping, where it is a value.
    """
    out = dict[str, Any]()
    for key, value in given.items():
        below = fields_below(fields[key]) if key in fields else None
        if below is not None and isinstance(value, Mapping):
            out[key] = without_nulls(value, below)
        elif value is not None or key not in fields:
            out[key] = value
    return out


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
