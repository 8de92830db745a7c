"""Problems of the keys of a Deployment that an engine does not honour, from the table in its facts.

A key that no `Refusal` names is honoured. What depends on several keys, or on the files of the models, is no entry of
the table but a check of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash_serve.adapter.checks import uses_drafter
from dflash_serve.adapter.facts import Refusal
from dflash_serve.common.settings import fields_below
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import Problem


def refusal_problems(deployment: Deployment, refusals: Sequence[Refusal]) -> list[Problem]:
    """A problem for each key that is not honoured, in the table's order: the first entry of the key that applies."""
    changed = _values(deployment.model_dump(exclude_defaults=True))
    given, drafts = _values(deployment.model_dump(exclude_unset=True)), uses_drafter(deployment)
    found: dict[str, Problem] = {}
    for one in refusals:
        asked = given if one.given else changed
        if one.key not in asked or one.key in found or (one.drafting and not drafts):
            continue
        value = asked[one.key]
        if not one.values or value in one.values:
            found[one.key] = Problem(one.what.format(value=value), one.key, one.do.format(value=value))
    return list(found.values())


def deployment_keys() -> list[str]:
    """Every key of a Deployment but `engine_args`, whose arguments an engine's own parser checks."""
    return [key for key in _keys(Deployment.model_fields) if key.rpartition(".")[2] != "engine_args"]


def _keys(fields: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, field in fields.items():
        below = fields_below(field)
        yield from [prefix + name] if below is None else _keys(below, f"{prefix}{name}.")


def _values(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a": {"b": 1}, "a.b": 1}: an entry of the table may name a whole section."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat[prefix + key] = value
        if isinstance(value, Mapping):
            flat |= _values(value, f"{prefix}{key}.")
    return flat
