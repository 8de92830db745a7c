"""Responses in OpenAI's shapes, errors included."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel
from starlette.responses import JSONResponse

from dflash_serve.errors import UserError
from dflash_serve.outputs import FinishReason
from dflash_serve.speculation.statistics import AcceptanceStatistics

ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
RETRY_SECONDS = {429: "1", 503: "5"}


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


class AssistantMessage(BaseModel):
    """The message of a whole chat answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Delta(BaseModel):
    """A piece of a chat answer's message."""

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
    """A piece of one of `n` answers, in a stream."""

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


class ErrorDetail(BaseModel):
    """What is wrong, in words, and for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """An OpenAI error."""

    error: ErrorDetail


class AsciiJSON(JSONResponse):
    """JSON that survives whatever a request made us repeat, lone surrogates included."""

    def render(self, content: Any) -> bytes:
        return ascii_json(content).encode("ascii")


class ApiError(Exception):
    """An answer that is an error.

    Args:
        param: the field of the request that is at fault.
        code: for programs, such as `context_length_exceeded`.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = ERROR_TYPES.get(status, "invalid_request_error")
        self.body = ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))

    @classmethod
    def of(cls, error: UserError) -> ApiError:
        """A mistake in the request."""
        return cls(400, str(error), param=error.where or None, code="invalid_value")

    def response(self) -> JSONResponse:
        """The error as an HTTP response."""
        retry = RETRY_SECONDS.get(self.status)
        return AsciiJSON(self.body.model_dump(), self.status, headers={"Retry-After": retry} if retry else None)


def ascii_json(content: Any) -> str:
    """JSON in ASCII: some clients take U+2028 and its like for the end of a line of an event stream."""
    return json.dumps(content, allow_nan=False, separators=(",", ":"))
