"""A Deployment read from its layers: YAML, environment and flags."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from dflash_serve.checkpoint.source import ALIAS, HUB_ID, WITH_HEAD
from dflash_serve.common.documents import read_yaml
from dflash_serve.common.provenance import query_gpus
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
from dflash_serve.deployment.gpus import GIB, GPUS, named_by
from dflash_serve.errors import UserError

OTHER_VARIABLES = ("API_KEY", "COST_TABLE", "SURVIVAL")  # Variables of ours that are not keys of a deployment
AUTO = "auto"
NAMES = (AUTO, ALIAS, WITH_HEAD)  # Models that are no folder, even where there is one of that name
COMMAND_LINE = "command line"
WHOLE = 0.9  # least share of the memory in our table that a whole GPU has


class GivenValue(NamedTuple):
    """A value that decides, and that does not come from the deployment's file."""

    key: str  # `speculation.width`
    value: object
    source: str  # `command line`, or the name of an environment variable

    @property
    def line(self) -> str:
        """Key, value and source."""
        return f"{self.key} = {self.value} ({self.source})"


class Layers(NamedTuple):
    """A Deployment, and where its values come from."""

    deployment: Deployment
    given: tuple[GivenValue, ...]

    @property
    def from_variables(self) -> list[GivenValue]:
        """The values that come from environment variables."""
        return [each for each in self.given if each.source != COMMAND_LINE]


def load_deployment(path: Path | None = None, flags: Mapping[str, Any] | None = None) -> Deployment:
    """The Deployment of `load_layers`."""
    return load_layers(path, flags).deployment


def load_layers(path: Path | None = None, flags: Mapping[str, Any] | None = None) -> Layers:
    """Merges YAML, environment and flags: flag > environment (`DFLASH_SERVE_SPECULATION__WIDTH=off`) > YAML > default.

    Args:
        path: a YAML file, or None. Its relative paths are taken from its folder.
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
    target = _target(given) or _target(environment) or _target(described)
    if path is not None:
        described = with_absolute_paths(described, path)
    environment, given = with_absolute_paths(environment), with_absolute_paths(given)
    merged = overlay({}, described)
    for layer in (environment, given):
        merged = overlay(merged, _spelt_as(merged, layer))
    if _target(merged) != target and not _has(merged, ["serving", "served_model_name"]):
        merged = overlay(merged, {"serving": {"served_model_name": target}})  # clients see no absolute path
    hardware = merged.get("hardware")
    if isinstance(hardware, Mapping) and str(hardware.get("gpu")).lower() == AUTO:
        merged = overlay(merged, {"hardware": {"gpu": _gpu_here()}})
    try:
        deployment = Deployment.model_validate(merged)
    except ValidationError as error:
        # The source of the first mistake: the layer of highest priority that has the key.
        place = [str(part) for part in first_mistake(error)["loc"] if part != "[key]"]
        where = str(path or "deployment")
        if _has(given, place):
            where = COMMAND_LINE
        elif _has(environment, place):
            where = ENV_PREFIX + NESTED.join(place[:2]).upper()
        raise UserError(describe(error, Deployment), where=where) from None
    return Layers(deployment, (*_given_by_flags(given), *_given_by_variables(environment, given)))


def with_absolute_paths(layer: Mapping[str, Any], file: Path | None = None) -> dict[str, Any]:
    """Keys of a Deployment with absolute paths, so that they name the same files wherever they are written to.

    Args:
        layer: the keys. A model is a path if there is such a folder, or if its name can be no hub id.
        file: the file that has the keys, whose folder its paths are relative to; None = the working folder.

    Raises:
        UserError: a model of the file is a folder of the working folder alone.
    """
    pipe = file is None or not file.is_file() or file.is_relative_to("/dev") or file.is_relative_to("/proc")
    folder = Path.cwd() if file is None or pipe else file.absolute().parent
    paths: dict[str, dict[str, str]] = {}
    for section, key in (("target", "model"), ("drafter", "model"), ("serving", "api_key_file")):
        keys = layer.get(section)
        name = keys.get(key) if isinstance(keys, Mapping) else None
        if not isinstance(name, str) or not name or name.startswith("~") or Path(name).is_absolute():
            continue
        here = folder / name
        if key == "model" and (name in NAMES or not (_is_there(here) or _can_be_no_id(name))):
            if name not in NAMES and _is_there(Path(name), folder=True):
                what = f"{name} is a folder of the working folder, and not of the file's"
                raise UserError(what, where=f"{file} {section}.{key}", do=f"give {Path(name).absolute()}")
            continue
        paths[section] = {key: str(here)}
    return overlay(layer, paths)


def _is_there(path: Path, *, folder: bool = False) -> bool:
    try:
        return path.is_dir() if folder else path.exists()
    except OSError:  # no file system has such a name
        return False


def _gpu_here() -> str:
    products = sorted(set(query_gpus("name")))
    where, do = "hardware.gpu", f"name one: {', '.join(GPUS)}; or leave it out"
    if len(products) != 1:
        found = "nvidia-smi finds no GPU" if not products else f"there are several kinds: {', '.join(products)}"
        raise UserError(f"auto takes this machine's GPU, and {found}", where=where, do=do)
    if (gpu := named_by(products[0])) is None:
        raise UserError(f"nothing is known of this machine's {products[0]}", where=where, do=do)
    least = min((int(each) << 20 for each in query_gpus("memory.total") if each.isdecimal()), default=gpu.memory)
    if least < WHOLE * gpu.memory or "Enabled" in query_gpus("mig.mode.current"):
        told = f"{least / GIB:.0f} GiB" if least < WHOLE * gpu.memory else "MIG slices"
        what = f"this machine's {products[0]} has {told}, a whole {gpu.name} has {gpu.memory / GIB:.0f} GiB"
        raise UserError(what, where=where, do="leave it out: nothing is known of a part of a GPU")
    return gpu.name


def _target(layer: Mapping[str, Any]) -> object:
    section = layer.get("target")
    return section.get("model") if isinstance(section, Mapping) else None


def _can_be_no_id(name: str) -> bool:
    return "/" in name and not HUB_ID.fullmatch(name)


def _given_by_flags(layer: Mapping[str, Any]) -> Iterator[GivenValue]:
    yield from (GivenValue(".".join(place), value, COMMAND_LINE) for place, value in _values(layer))


def _given_by_variables(layer: Mapping[str, Any], flags: Mapping[str, Any]) -> Iterator[GivenValue]:
    overriding = _spelt_as(layer, flags)
    for place, value in _values(layer):
        if not _has(overriding, place):
            names = (ENV_PREFIX + NESTED.join(place[:depth]).upper().replace("-", "_") for depth in (3, 2, 1))
            given = {name.upper() for name in os.environ}
            yield GivenValue(".".join(place), value, next((name for name in names if name in given), ENV_PREFIX))
    for name in OTHER_VARIABLES[1:]:
        if ENV_PREFIX + name in os.environ:
            yield GivenValue(name.lower().replace("_", " "), os.environ[ENV_PREFIX + name], ENV_PREFIX + name)


def _values(layer: Mapping[str, Any]) -> Iterator[tuple[list[str], object]]:
    """(place, value) of every value, and of every argument of an engine."""
    for section, keys in layer.items():
        for key, value in keys.items() if isinstance(keys, Mapping) else [("", keys)]:
            if section == "engine_args" and isinstance(value, Mapping):
                yield from (([section, key, str(name)], argument) for name, argument in value.items())
            else:
                yield [section, key] if key else [section], value


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


def _variables(fields: Mapping[str, FieldInfo] = Deployment.model_fields, prefix: str = "") -> Iterator[str]:
    for name, field in fields.items():
        yield (prefix + name).upper()
        below = fields_below(field)
        if below is not None:
            yield from _variables(below, f"{prefix}{name}{NESTED}")
        elif "dict" in str(field.annotation):
            yield f"{prefix}{name}{NESTED}".upper()


def _has(layer: Any, place: list[str]) -> bool:
    for part in place:
        if not isinstance(layer, Mapping):
            return True
        if part not in layer:
            return False
        layer = layer[part]
    return True
