"""Responses in OpenAI's shapes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from dflash_serve.outputs import FinishReason


class CachedTokens(BaseModel):
    """Of the prompt's tokens, those whose K/V was reused."""

    cached_tokens: int = 0


class Usage(BaseModel):
    """Tokens; an end-of-sequence token counts, what follows a stop string does not."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None


class SpeculativeDecoding(BaseModel):
    """Acceptance of one answer, in vLLM's shape. Steps that verified no drafted token are not counted."""

    num_spec_tokens: int
    """B - 1, the most drafted tokens of a step."""
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float | None
    """Tokens gained per step, the bonus token counted; null where no step drafted."""
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    """Steps by drafted tokens accepted, 0 to num_spec_tokens."""
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


class ResponseMetrics(BaseModel):
    """What was measured on the way."""

    speculative_decoding: SpeculativeDecoding | None = None


class TopLogprob(BaseModel):
    """One of the most probable tokens."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(TopLogprob):
    """A generated token."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of a chat answer's tokens."""

    content: list[TokenLogprobs]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Of a completion's tokens, in parallel lists."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class AssistantMessage(BaseModel):
    """The whole answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Delta(BaseModel):
    """A piece of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(BaseModel):
    """One of `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = None
    """Where `return_token_ids` asks for them."""


class ChatChunkChoice(BaseModel):
    """News of one of `n` answers."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None


class CompletionChoice(BaseModel):
    """One answer, or in a stream a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None


class Envelope(BaseModel):
    """What every response says."""

    id: str
    created: int
    model: str
    system_fingerprint: None = None
    usage: Usage | None = None
    metrics: ResponseMetrics | None = None


class ChatCompletion(Envelope):
    """The whole response."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatCompletionChunk(Envelope):
    """An event of a stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class Completion(Envelope):
    """The whole response, and an event of a stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "dflash-serve"
    max_model_len: int | None = None


class ModelList(BaseModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Status(BaseModel):
    """Liveness and readiness."""

    status: str
