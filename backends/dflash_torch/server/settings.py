"""The HTTP server's own settings, beside the Deployment: environment `DFLASH_SERVE_HTTP_*`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic_settings import BaseSettings, SettingsConfigDict

from ..facts import SETTINGS_PREFIX
from .api import AcceptanceMetrics


class ServerSettings(BaseSettings):
    """Settings of the server. A request beyond a limit gets a 4xx error that names the limit."""

    model_config = SettingsConfigDict(env_prefix=SETTINGS_PREFIX, frozen=True, extra="ignore")

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, lt=65536)
    served_model_name: str | None = None  # in the API; None = the deployment's target
    api_key_file: Path | None = None  # one key a line; None = open to all
    log_format: Literal["text", "json"] = "text"  # json = one object a line
    acceptance_metrics: AcceptanceMetrics = "none"  # default of the requests' field of this name
    # A step's small operators: `auto` compiles them, on a CPU with a C++ compiler and on a GPU with Triton; `plain` is
    # PyTorch's. `flashinfer` is for a GPU: prompts and long contexts attend by FlashInfer's kernels, which no test of
    # ours has run on one.
    operators: Literal["auto", "plain", "flashinfer"] = "auto"
    drain_seconds: NonNegativeFloat = 30  # for running requests after SIGTERM
    # Time between two comments that keep a stream open while no chunk comes; 0 = no comments.
    ping_seconds: NonNegativeFloat = 15
    # Folder; a client with the API key may put a drafter below it in place of the served one. None = no such route.
    swap_from: Path | None = None
    # Folder for chats and their answers, as `adapt --traffic` reads them. None = nothing is recorded.
    record_to: Path | None = None
    record_megabytes: PositiveInt = 256  # of all files of the folder; the oldest are deleted
    record_days: PositiveFloat = 14  # after which a chat is deleted
    max_body_bytes: PositiveInt = 4 * 1024 * 1024
    max_header_bytes: PositiveInt = 16 * 1024
    body_seconds: PositiveFloat = 30  # for a client to send a request, head and body
    max_messages: PositiveInt = 1024
    max_prompts: PositiveInt = 16
    max_n: PositiveInt = 16
