"""Sampling parameters of a request: one frozen, validated description. Needs no torch."""

from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, field_validator, model_validator

MIN_TEMPERATURE: Final = 0.01  # a lower positive temperature only risks overflow; vLLM raises it to this value too
MAX_STOP_STRINGS: Final = 4
MAX_LOGIT_BIAS: Final = 100.0


def _as_tuple(value: object) -> object:
    """A lone stop string is a tuple of one; null is no stop string."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


class SamplingParams(BaseModel):
    """Sampling parameters of one request, with vLLM's names, ranges and meanings.

    `speculative` is ours. Three differ from vLLM's: a `logit_bias` beyond ±100 is refused rather than clamped, so is a
    `repetition_penalty` that overflows float32, and `max_tokens` defaults to the most that fit rather than to 16.
    `top_k` -1 and `seed` -1 mean off.

    Raises:
        pydantic.ValidationError: a field is unknown or out of its range; the message names the field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: float = Field(1.0, ge=0, le=2, description="0 is greedy: always the most probable token")
    top_p: float = Field(1.0, gt=0, le=1, description="keep the fewest tokens that reach top_p together; 1 is off")
    top_k: int = Field(0, ge=0, description="keep the top_k most probable tokens; 0 (or -1) is off")
    min_p: float = Field(0.0, ge=0, le=1, description="drop tokens below min_p x the highest probability; 0 is off")
    repetition_penalty: float = Field(
        1.0, ge=0.01, le=100, description="divides logits of tokens in prompt or output; 1 is off"
    )
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="subtracted once for a token of the output")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="subtracted per occurrence in the output")
    logit_bias: dict[
        Annotated[NonNegativeInt, Field(strict=False)], Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]
    ] = Field(default_factory=dict, description="token id -> what is added to its logit, in [-100, 100]")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="same seed and request: same tokens; -1 is none")
    max_tokens: int | None = Field(None, ge=1, description="most tokens to generate; null is as many as fit")
    min_tokens: int = Field(0, ge=0, description="no stop token, end of sequence or stop string ends it before")
    stop: Annotated[tuple[str, ...], Field(fail_fast=True, strict=False), BeforeValidator(_as_tuple)] = Field(
        (), description="up to 4 strings that end the output; they are not part of it"
    )
    stop_token_ids: Annotated[tuple[NonNegativeInt, ...], Field(fail_fast=True, strict=False)] = Field(
        (), description="token ids that end the output"
    )
    ignore_eos: bool = Field(False, description="generate on after the end-of-sequence token")
    logprobs: int | None = Field(None, ge=0, le=20, description="log probabilities of so many best tokens; null: none")
    speculative: Annotated[int, Field(ge=1)] | Literal["auto", "off"] = Field(
        "auto", description="off: it is not drafted for; a number: most slots of its blocks, the anchor counted"
    )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """The logits depend on the tokens already seen."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @model_validator(mode="after")
    def _limits_agree(self) -> "SamplingParams":
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: {self.min_tokens} is more than max_tokens {self.max_tokens}")
        return self

    @field_validator("temperature")
    @classmethod
    def _avoid_overflow(cls, value: float) -> float:
        return value if value == 0 else max(value, MIN_TEMPERATURE)

    @field_validator("top_k", mode="before")
    @classmethod
    def _minus_one_is_off(cls, value: object) -> object:
        return 0 if value == -1 else value

    @field_validator("seed")
    @classmethod
    def _minus_one_is_none(cls, value: int | None) -> int | None:
        return None if value == -1 else value

    @field_validator("stop")
    @classmethod
    def _few_and_not_empty(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(value)}; send the most important ones")
        if "" in value:
            raise ValueError("an empty stop string would end every output at once; remove it")
        return value
