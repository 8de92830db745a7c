"""What the HTTP server takes on, beside the Deployment: environment `DFLASH_SERVE_HTTP_*`, or flags of `serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic_settings import BaseSettings, SettingsConfigDict

AcceptanceMetrics = Literal["none", "summary", "detailed"]

ENV_PREFIX = "DFLASH_SERVE_HTTP_"


class ServerSettings(BaseSettings):
    """Frozen; every cap answers with a 4xx that names it."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="ignore")

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, lt=65536)
    served_model_name: str | None = None
    """None = as the deployment names the target."""
    api_key_file: Path | None = None
    """One key a line; None = open to all."""
    open_metrics: bool = False
    """/metrics without a key, for a Prometheus that has none."""
    acceptance_metrics: AcceptanceMetrics = "none"
    """`metrics.speculative_decoding` in responses whose request does not say."""
    drain_seconds: NonNegativeFloat = 30
    """How long running requests may go on after SIGTERM."""
    max_body_bytes: PositiveInt = 4 * 1024 * 1024
    max_header_bytes: PositiveInt = 16 * 1024
    body_seconds: PositiveFloat = 30
    """How long a client may take to send a body."""
    max_messages: PositiveInt = 1024
    max_prompts: PositiveInt = 16
    max_n: PositiveInt = 16
