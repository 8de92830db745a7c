"""The HTTP server's own settings, beside the Deployment: environment `DFLASH_SERVE_HTTP_*`, and a file of API keys."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic_settings import BaseSettings, SettingsConfigDict

from dflash_serve.errors import UserError

from ..facts import SETTINGS_PREFIX
from .protocol import AcceptanceMetrics


class ServerSettings(BaseSettings):
    """Frozen; every cap answers with a 4xx that names it."""

    model_config = SettingsConfigDict(env_prefix=SETTINGS_PREFIX, frozen=True, extra="ignore")

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, lt=65536)
    served_model_name: str | None = None
    """None = as the deployment names the target."""
    api_key_file: Path | None = None
    """One key a line; None = open to all."""
    log_format: Literal["text", "json"] = "text"
    """json = one object a line."""
    acceptance_metrics: AcceptanceMetrics = "none"
    """`metrics.speculative_decoding` in responses whose request does not say."""
    operators: Literal["auto", "plain"] = "auto"
    """A step's small operators on a CPU: `auto` compiles them where there is a C++ compiler, `plain` leaves them to
    PyTorch."""
    drain_seconds: NonNegativeFloat = 30
    """How long running requests may go on after SIGTERM."""
    ping_seconds: NonNegativeFloat = 15
    """Between two comments that keep a stream's connection open while no chunk comes; 0 = none are sent."""
    max_body_bytes: PositiveInt = 4 * 1024 * 1024
    max_header_bytes: PositiveInt = 16 * 1024
    body_seconds: PositiveFloat = 30
    """How long a client may take to send a body."""
    max_messages: PositiveInt = 1024
    max_prompts: PositiveInt = 16
    max_n: PositiveInt = 16


def read_api_keys(path: Path | None) -> list[str]:
    """One key a line; empty lines and lines that begin with # are skipped. None = no keys.

    Raises:
        UserError: the file cannot be read or has no key.
    """
    if path is None:
        return []
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read ({error})", where=str(path), do="give a file with one key a line") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UserError("has no key", where=str(path), do="write one key a line, or leave --api-key-file out")
    return keys
