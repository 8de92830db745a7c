"""Requests as OpenAI's clients send them. Unknown fields are refused; null means the default; nothing here runs code.

Sampling fields are inherited from `SamplingParams`: their ranges and meanings stand there and nowhere else.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dflash_serve.speculation.params import SamplingParams

AcceptanceMetrics = Literal["none", "summary", "detailed"]

MAX_BIASED_TOKENS = 1024
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 128
"""Every step pays for these, and the neighbours with it."""


class Strict(BaseModel):
    """Unknown fields are refused, null fields are as good as absent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(Strict):
    """What a stream says beside the text."""

    include_usage: bool = False
    """A last chunk without choices carries the usage."""
    include_obfuscation: bool = False
    """Taken and ignored: padding against traffic analysis is the connection's business."""


class AnyText(Strict):
    """No constraint."""

    type: Literal["text"]


class JsonObject(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Strict):
    """A JSON schema as OpenAI wraps it."""

    name: str
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    description: str = ""
    strict: bool = False
    """Taken and ignored: it is always enforced."""


class JsonSchema(Strict):
    """JSON of this schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class Regex(Strict):
    """Text that matches from beginning to end. Ours: OpenAI has none."""

    type: Literal["regex"]
    pattern: str


ResponseFormat = Annotated[AnyText | JsonObject | JsonSchema | Regex, Field(discriminator="type")]


class StructuredOutputs(Strict):
    """vLLM's way to ask for a form; one of the three."""

    json_: dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=1024)


class Generation(SamplingParams):
    """What chat and plain completions have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str
    n: int = Field(1, ge=1, description="answers to one prompt")
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat = AnyText(type="text")
    structured_outputs: StructuredOutputs | None = Field(None, description="as with vLLM")
    regex: str | None = Field(None, description="the answer matches it from beginning to end, as with SGLang")
    return_token_ids: bool = Field(False, description="choices carry token_ids, as with vLLM and SGLang")
    cache_salt: str = Field("", max_length=256, description="only requests of the same salt share prefixes")
    acceptance_metrics: AcceptanceMetrics | None = Field(None, description="metrics.speculative_decoding; n = 1 only")
    user: str = Field("", description="taken and ignored, as are the next three")
    metadata: dict[str, str] = Field(default_factory=dict)
    store: bool = False
    service_tier: str = "auto"

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        json.dumps(data, ensure_ascii=False).encode()  # a lone surrogate is a ValueError: the client's mistake
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _within_reason(self) -> Generation:
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise ValueError(f"logit_bias: {len(self.logit_bias)} tokens, at most {MAX_BIASED_TOKENS} are taken")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise ValueError(f"stop_token_ids: {len(self.stop_token_ids)}, at most {MAX_STOP_TOKENS} are taken")
        if any(len(stop) > MAX_STOP_CHARACTERS for stop in self.stop):
            raise ValueError(f"stop: a stop string has at most {MAX_STOP_CHARACTERS} characters")
        if self.stream_options.include_usage and not self.stream:
            raise ValueError("stream_options: only with stream: true")
        if len(self.forms) > 1:
            raise ValueError(f"{' and '.join(self.forms)}: only one of them can be obeyed")
        if self.forms and self.min_tokens:
            raise ValueError(f"min_tokens: not with {self.forms[0]}, which says when an answer is complete")
        return self

    @property
    def forms(self) -> list[str]:
        """The fields that ask for a form of the answer."""
        given = [] if isinstance(self.response_format, AnyText) else ["response_format"]
        for name in ("json_", "regex", "choice") if self.structured_outputs else ():
            if getattr(self.structured_outputs, name) is not None:
                given.append(f"structured_outputs.{name.rstrip('_')}")
        return [*given, "regex"] if self.regex is not None else given

    def sampling_params(self) -> SamplingParams:
        """The fields that are the engine's business."""
        return SamplingParams(**{name: getattr(self, name) for name in SamplingParams.model_fields})


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1, description="most tokens to generate")
    echo: bool = Field(False, description="the prompt's text comes before the answer's; not with logprobs")

    @model_validator(mode="after")
    def _defaults_agree(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo: not with logprobs, which the prompt's tokens have none of here")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [entry for entry in self.prompt if isinstance(entry, int)]
        return [tokens] if tokens else [entry for entry in self.prompt if not isinstance(entry, int)]
