"""Settings from a YAML file, the environment and flags, merged; a mistake is one line that says where it stands."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError, create_model
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from dflash_serve.common.yaml_file import describe, fields_below, first_mistake, read_yaml
from dflash_serve.errors import UserError, did_you_mean

ENV_PREFIX = "DFLASH_SERVE_"
NESTED = "__"
"""Between a section and its key in the name of a variable."""
Settings = TypeVar("Settings", bound=BaseModel)


def merged_settings(
    model: type[Settings], path: Path | None, flags: Mapping[str, Any], *, start: str, others: Sequence[str] = ()
) -> Settings:
    """The settings by flag > environment > YAML > the type's defaults.

    Args:
        path: a YAML file, or None.
        flags: nested; None values count as not given.
        start: how a file begins, for whoever gives one that is no mapping.
        others: names of variables, without the prefix, that are not of the type; one that is almost theirs is refused.

    Raises:
        UserError: a file that cannot be read, an unknown key or an impossible value (the first one is named).
    """
    _refuse_misspelt(model, others)
    layers = [_read_mapping(path, start) if path else {}, _environment(model), overlay({}, flags)]
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = overlay(merged, layer)
    try:
        return model.model_validate(merged)
    except ValidationError as error:
        raise UserError(describe(error, model), where=_where(error, layers[1:], path)) from None


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


def _read_mapping(path: Path, start: str) -> dict[str, Any]:
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        raise UserError("not a mapping", where=str(path), do=f"start with `{start}`")
    return raw


def _environment(model: type[BaseModel]) -> dict[str, Any]:
    config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_nested_delimiter=NESTED, extra="ignore")
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in model.model_fields.items()}
    lender = create_model("Environment", __base__=BaseSettings, **fields)
    lender.model_config = SettingsConfigDict(**{**BaseSettings.model_config, **config})
    found: dict[str, Any] = EnvSettingsSource(lender)()
    return found


def _refuse_misspelt(model: type[BaseModel], others: Sequence[str]) -> None:
    """Variables that name no key: a misspelt one would change nothing, in silence.

    One without a `__` may be somebody else's (Kubernetes makes DFLASH_SERVE_PORT of a service's name): it is refused
    only where it looks like one of ours.

    Raises:
        UserError: the first such variable.
    """
    known = {*_variables(model), *others}
    for variable in sorted(os.environ):
        name = variable.upper().removeprefix(ENV_PREFIX)
        if name == variable.upper() or any(
            name == one or (one.endswith(NESTED) and name.startswith(one)) for one in known
        ):
            continue
        hint = did_you_mean(name, [one for one in known if not one.endswith(NESTED)], prefix=ENV_PREFIX)
        if hint or NESTED in name:
            raise UserError("names no key of the deployment", where=variable, do=hint or "unset it")


def refuse_near_misses(prefix: str, known: Sequence[str]) -> None:
    """Variables of a prefix that are almost one of the known names; any other may be somebody else's.

    Raises:
        UserError: the first such variable.
    """
    for variable in sorted(name for name in os.environ if name.startswith(prefix)):
        name = variable.removeprefix(prefix)
        hint = "" if name in known else did_you_mean(name, known, prefix=prefix)
        if hint:
            raise UserError("names no setting", where=variable, do=hint)


def _variables(model: type[BaseModel]) -> Iterator[str]:
    """Every variable's name without the prefix; one that ends in `__` may go on as it likes."""
    for name, field in model.model_fields.items():
        yield name.upper()
        below = fields_below(field)
        yield from (f"{name}{NESTED}{key}".upper() for key in below or ())
        if below is None and "dict" in str(field.annotation):
            yield f"{name}{NESTED}".upper()


def _where(error: ValidationError, layers: list[dict[str, Any]], path: Path | None) -> str:
    """What gave the first mistake: the topmost layer that has it."""
    place = [str(part) for part in first_mistake(error)["loc"]]
    environment, flags = layers
    if _has(flags, place):
        return "command line"
    if _has(environment, place):
        return ENV_PREFIX + NESTED.join(place[:2]).upper()
    return str(path or "deployment")


def _has(layer: Any, place: list[str]) -> bool:
    for part in place:
        if not isinstance(layer, Mapping):
            return True
        if part not in layer:
            return False
        layer = layer[part]
    return True
