"""Responses in OpenAI's shapes; errors are in `api_errors`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer

from dflash_serve.outputs import FinishReason
from dflash_serve.speculation.statistics import AcceptanceStatistics

ChatFinishReason = FinishReason | Literal["tool_calls"]


class CachedTokens(BaseModel):
    """How many of the prompt's tokens had their K/V reused."""

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

    @classmethod
    def of(
        cls, counts: AcceptanceStatistics, block_size: int, steps: Sequence[tuple[int, int]] | None = None
    ) -> SpeculativeDecoding:
        """What one answer's counts say.

        Args:
            block_size: B, the anchor counted.
            steps: (width, accepted) of each step; those that verified a draft are listed one by one where given.
        """
        drafted, accepted = int(counts.drafted or 0), int(counts.accepted or 0)
        lengths = counts.acceptance_lengths or {}
        verifications = None if steps is None else [(width, right) for width, right in steps if width > 1]
        return cls(
            num_spec_tokens=block_size - 1,
            num_spec_steps=int(counts.verifications or 0),
            num_draft_tokens=drafted,
            num_accepted_draft_tokens=accepted,
            mean_acceptance_length=counts.acceptance_length,
            draft_acceptance_rate=accepted / drafted if drafted else None,
            acceptance_histogram=[int(lengths.get(1 + right, 0)) for right in range(block_size)],
            per_step_accepted=None if verifications is None else [right for _, right in verifications],
            per_step_drafted=None if verifications is None else [width - 1 for width, _ in verifications],
        )


class ResponseMetrics(BaseModel):
    """Measurements of this response."""

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
    """Log probabilities of a chat answer's tokens."""

    content: list[TokenLogprobs]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Log probabilities of a completion's tokens, in parallel lists."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class Call(BaseModel):
    """The function that the client is asked to call, and with what."""

    name: str
    arguments: str
    """A JSON object of the tool's schema, as text."""


class ToolCall(BaseModel):
    """A call, and the id by which its result refers to it."""

    id: str
    type: Literal["function"] = "function"
    function: Call


class Piece(BaseModel):
    """Of a call; fields that this piece does not have are left out, or clients would take null for their new value."""

    @model_serializer(mode="wrap")
    def _without_nulls(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}


class FunctionDelta(Piece):
    """The name with a call's first piece, and the next piece of its arguments."""

    name: str | None = None
    arguments: str = ""


class CallDelta(Piece):
    """A piece of a call; id and type come with the first."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class AssistantMessage(BaseModel):
    """The message of a whole chat answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """None where it only calls."""
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class Delta(BaseModel):
    """A piece of a chat answer's message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChoice(BaseModel):
    """One of `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    token_ids: list[int] | None = None
    """Where `return_token_ids` asks for them."""


class ChatChunkChoice(BaseModel):
    """A piece of one of `n` answers, in a stream."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    token_ids: list[int] | None = None


class CompletionChoice(BaseModel):
    """One answer, or in a stream a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None


class Envelope(BaseModel):
    """The fields that every generated response has."""

    id: str
    created: int
    model: str
    system_fingerprint: None = None
    usage: Usage | None = None
    metrics: ResponseMetrics | None = None


class ChatCompletion(Envelope):
    """A chat response without a stream."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatCompletionChunk(Envelope):
    """An event of a chat stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class Completion(Envelope):
    """A completion response, and an event of a stream of them."""

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
    """All models that are served: one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Status(BaseModel):
    """Liveness and readiness."""

    status: str
