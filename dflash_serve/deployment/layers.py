"""A Deployment read from its layers: YAML, environment and flags."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dflash_serve.common.documents import read_yaml
from dflash_serve.common.settings import (
    ENV_PREFIX,
    NESTED,
    describe,
    fields_below,
    first_mistake,
    overlay,
    refuse_misspelt,
    without_nulls,
)
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError

OTHER_VARIABLES = ("API_KEY", "COST_TABLE", "SURVIVAL")  # Variables of ours that are not keys of a deployment


def load_deployment(path: Path | None = None, flags: Mapping[str, Any] | None = None) -> Deployment:
    """Merges YAML, environment and flags: flag > environment (`DFLASH_SERVE_SPECULATION__WIDTH=off`) > YAML > default.

    Args:
        path: a YAML file, or None.
        flags: nested values given on the command line; None values, and sections of them alone, count as not given.

    Raises:
        UserError: a file that cannot be read, an unknown key or an impossible value: the first one, and where it is.
    """
    if path is not None and path.is_dir():
        raise UserError("a folder, no deployment", where=str(path), do=f"give a deployment.yaml, or --target {path}")
    refuse_misspelt(ENV_PREFIX, {*_variables(), *OTHER_VARIABLES}, "names no key of the deployment")
    described = read_yaml(path) if path else {}
    if not isinstance(described, dict):
        raise UserError("not a mapping", where=str(path), do="start with `target: {model: ...}`")
    described, environment, given = (
        without_nulls(layer, Deployment.model_fields) for layer in (described, _environment(), flags or {})
    )
    given = {section: keys for section, keys in given.items() if keys != {}}
    merged = overlay({}, described)
    for layer in (environment, given):
        merged = overlay(merged, _spelt_as(merged, layer))
    try:
        return Deployment.model_validate(merged)
    except ValidationError as error:
        # The source of the first mistake: the layer of highest priority that has the key.
        place = [str(part) for part in first_mistake(error)["loc"] if part != "[key]"]
        where = str(path or "deployment")
        if _has(given, place):
            where = "command line"
        elif _has(environment, place):
            where = ENV_PREFIX + NESTED.join(place[:2]).upper()
        raise UserError(describe(error, Deployment), where=where) from None


def _environment() -> dict[str, Any]:
    if not any(name.upper().startswith(ENV_PREFIX) for name in os.environ):
        return {}
    from dflash_serve.deployment.environment import read_environment  # pydantic-settings, which takes 0.3 s to import

    return read_environment()


def _spelt_as(below: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """The layer with its `engine_args` in the spelling of the layers below, whose values it replaces."""

    def spelt(known: Any, given: Any) -> Any:
        if not isinstance(known, Mapping) or not isinstance(given, Mapping):
            return given
        names = {str(name).replace("_", "-"): name for name in known}
        return {names.get(str(name).replace("_", "-"), name): value for name, value in given.items()}

    own, others = layer.get("engine_args"), below.get("engine_args")
    if not isinstance(own, Mapping) or not isinstance(others, Mapping):
        return dict(layer)
    return {**layer, "engine_args": {name: spelt(others.get(name), given) for name, given in own.items()}}


def _variables() -> Iterator[str]:
    for name, field in Deployment.model_fields.items():
        yield name.upper()
        below = fields_below(field)
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
