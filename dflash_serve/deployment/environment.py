"""The keys of a Deployment that variables of the environment give, read by pydantic-settings."""

from __future__ import annotations

from typing import Any

from pydantic import create_model
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from dflash_serve.common.documents import TEXT, parse_json
from dflash_serve.common.settings import ENV_PREFIX, NESTED, fields_below
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError, first_line


def read_environment() -> dict[str, Any]:
    """The keys of a Deployment that variables `DFLASH_SERVE_...` give, as text or as JSON.

    An argument of an engine is read as JSON where it is some, as YAML would read it: 5 is a number, and true no text.

    Raises:
        UserError: a value that is no JSON where a whole section is meant.
    """
    config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_nested_delimiter=NESTED, extra="ignore")
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in Deployment.model_fields.items()}
    lender = create_model("Environment", __base__=BaseSettings, **fields)
    lender.model_config = SettingsConfigDict(**{**BaseSettings.model_config, **config})
    found: dict[str, Any] = _Variables(lender)()
    if isinstance(found.get("engine_args"), dict):  # the name of a variable has no dash
        found["engine_args"] = {name.replace("_", "-"): _typed(given) for name, given in found["engine_args"].items()}
    return found


def _typed(given: Any) -> Any:
    # pydantic-settings from 2.16.3 on leaves numbers below a union as text; earlier releases do not.
    if isinstance(given, dict):
        return {name: _typed(value) for name, value in given.items()}
    try:
        return parse_json(given, TEXT, where="") if isinstance(given, str) else given
    except UserError:
        return given


class _Variables(EnvSettingsSource):
    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        try:
            return parse_json(value, TEXT, where=field_name)
        except UserError as error:
            raise ValueError(error.what) from None

    def prepare_field_value(self, field_name: str, field: FieldInfo, value: Any, value_is_complex: bool) -> Any:
        try:
            return super().prepare_field_value(field_name, field, value, value_is_complex)
        except ValueError as error:
            variable = f"{ENV_PREFIX}{field_name}".upper()
            key = next(iter(fields_below(field) or ("sglang",))).upper()
            do = f"give JSON of the whole section, or one key: {variable}{NESTED}{key}=..."
            raise UserError(first_line(error), where=variable, do=do) from None
