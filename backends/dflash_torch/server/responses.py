"""Responses in OpenAI's shapes: models of whole responses, and the formatters that write responses and events.

An event of a stream is a plain dict: a pydantic model for each token would cost more than the token's JSON.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from time import time
from typing import Any, Literal

from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

from dflash_serve.backend import Chunk, FinishReason, TokenLogprob
from dflash_serve.speculation.statistics import AcceptanceStatistics

from ..grammar import Grammars
from ..request import Request
from .api import AcceptanceMetrics, ChatRequest, CompletionRequest, Generation
from .chat import CallDelta, CallReader, ChatFinishReason, finish_of, read_calls

# Stands for minus infinity in JSON, as in vLLM.
LOWEST = -9999.0


class CachedTokens(BaseModel):
    """Prompt tokens whose K/V was reused."""

    cached_tokens: int = 0


class Usage(BaseModel):
    """Numbers of tokens. An end-of-sequence token counts; tokens behind a stop string do not."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None


class SpeculativeDecoding(BaseModel):
    """Acceptance of one answer, in vLLM's shape. Steps that verified no drafted token are not counted."""

    num_spec_tokens: int  # B - 1, the most drafted tokens of a step
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float | None  # tokens gained per step, the bonus token counted; null where no step drafted
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]  # steps by drafted tokens accepted, 0 to num_spec_tokens
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None

    @classmethod
    def of(
        cls, counts: AcceptanceStatistics, block_size: int, steps: Sequence[tuple[int, int]] | None = None
    ) -> SpeculativeDecoding:
        """The statistics of one answer in this shape.

        Args:
            block_size: B, the anchor counted.
            steps: (width, accepted) of each step; None = the response does not list steps.
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
    """Name and arguments of a function that the client is asked to call."""

    name: str
    arguments: str  # a JSON object of the tool's schema, as text


class ToolCall(BaseModel):
    """A call, and the id by which its result refers to it."""

    id: str
    type: Literal["function"] = "function"
    function: Call


class AssistantMessage(BaseModel):
    """The message of a whole chat answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None  # None where the answer has calls and no text
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One of `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    token_ids: list[int] | None = None  # None without `return_token_ids`


class CompletionChoice(BaseModel):
    """One answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
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


class Completion(Envelope):
    """A completion response without a stream."""

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
    """The models that are served: always one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Status(BaseModel):
    """Liveness and readiness."""

    status: str


class TokenNames:
    """Log probabilities with their tokens as text and bytes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, grammars: Grammars) -> None:
        self._tokenizer, self._grammars = tokenizer, grammars

    def chat(self, entries: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
        """Log probabilities in the shape of chat completions."""
        if entries is None:
            return None
        content = []
        for entry in entries:
            top = [self._named(token, value) for token, value in entry.top]
            own = self._named(entry.token_id, entry.logprob)
            content.append(TokenLogprobs(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top))
        return ChatLogprobs(content=content)

    def completion(self, entries: Sequence[TokenLogprob] | None, offset: int) -> CompletionLogprobs | None:
        """Log probabilities in the older shape of plain completions.

        Args:
            offset: where in the answer the text of the first token begins, in characters.
        """
        if entries is None:
            return None
        named = [self._named(entry.token_id, entry.logprob) for entry in entries]
        offsets = []
        for own in named:
            offsets.append(offset)
            offset += len(own.token)
        return CompletionLogprobs(
            tokens=[own.token for own in named],
            token_logprobs=[own.logprob for own in named],
            top_logprobs=[self._top(entry) for entry in entries],
            text_offset=offsets,
        )

    def _top(self, entry: TokenLogprob) -> dict[str, float]:  # the generated token is always among them
        named = [self._named(*pair) for pair in (*entry.top, (entry.token_id, entry.logprob))]
        return {own.token: own.logprob for own in reversed(named)}

    def _named(self, token: int, logprob: float) -> TopLogprob:
        text = str(self._tokenizer.decode([token]))
        value = max(logprob, LOWEST)
        return TopLogprob(token=text, logprob=value, bytes=list(self._grammars.token_bytes(token)))


class Formatter(ABC):
    """Writes the response of one HTTP request.

    Args:
        body: its `n` answers to each prompt: answers `i * n` to `i * n + n - 1` share prompt `i`.
        acceptance: figures of acceptance in the response.
        block_size: B; None without a drafter.
    """

    id_prefix: str
    event_object: str

    def __init__(
        self, body: Generation, names: TokenNames | None, *, acceptance: AcceptanceMetrics, block_size: int | None
    ) -> None:
        self.body, self.names, self.acceptance, self.block_size = body, names, acceptance, block_size
        self.id, self.created = f"{self.id_prefix}-{secrets.token_hex(12)}", int(time())
        self._sent: dict[int, int] = {}  # characters of each begun answer's tokens that events have shown

    @abstractmethod
    def event(self, chunk: Chunk) -> dict[str, Any] | None:
        """The event of one chunk; None where it would be empty: a step may bring half a character only."""

    @abstractmethod
    def whole(self, answers: list[Chunk], requests: Sequence[Request]) -> Envelope:
        """The response without a stream; each answer is all its chunks in one.

        Args:
            requests: the scheduler's finished requests, one for each answer.
        """

    def totals(self, requests: Sequence[Request]) -> dict[str, Any]:
        """The last event of a stream where usage was asked for: all totals, and no choices."""
        metrics = self._metrics(requests)
        return self._envelope([], self._usage(requests).model_dump(), metrics and metrics.model_dump())

    def _envelope(
        self, choices: list[dict[str, Any]], usage: object | None = None, metrics: object | None = None
    ) -> dict[str, Any]:  # the fields of `Envelope`
        return {
            "id": self.id,
            "created": self.created,
            "model": self.body.model,
            "system_fingerprint": None,
            "usage": usage,
            "metrics": metrics,
            "object": self.event_object,
            "choices": choices,
        }

    def _is_empty(self, chunk: Chunk, text: str) -> bool:
        return not (text or chunk.logprobs or chunk.finish_reason or self.body.return_token_ids)

    def _token_ids(self, chunk: Chunk) -> list[int] | None:
        return chunk.token_ids if self.body.return_token_ids else None

    def _usage(self, requests: Sequence[Request]) -> Usage:
        of_prompts = requests[:: self.body.n]
        prompt = sum(request.prompt_length for request in of_prompts)
        completion = sum(len(request.output_ids) for request in requests)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=CachedTokens(cached_tokens=sum(request.reused for request in of_prompts)),
        )

    def _metrics(self, requests: Sequence[Request]) -> ResponseMetrics | None:  # null for several answers, as in vLLM
        if self.acceptance == "none":
            return None
        if len(requests) != 1 or self.block_size is None:
            return ResponseMetrics()
        steps = requests[0].steps if self.acceptance == "detailed" else None
        return ResponseMetrics(
            speculative_decoding=SpeculativeDecoding.of(requests[0].statistics, self.block_size, steps)
        )


class ChatFormatter(Formatter):
    """Formats chat completions."""

    id_prefix, event_object = "chatcmpl", "chat.completion.chunk"

    def __init__(
        self, body: ChatRequest, names: TokenNames | None, *, acceptance: AcceptanceMetrics, block_size: int | None
    ) -> None:
        super().__init__(body, names, acceptance=acceptance, block_size=block_size)
        self._calling = bool(body.offered)
        self._readers = defaultdict[int, CallReader](CallReader)  # by answer, where answers may call tools

    def event(self, chunk: Chunk) -> dict[str, Any] | None:
        text, calls, begun, index = chunk.text, list[CallDelta](), 0, chunk.index
        if self._calling:
            reader = self._readers[index]
            text, calls = reader.feed(text, last=chunk.finish_reason is not None)
            begun = reader.calls
        if not calls and self._is_empty(chunk, text):
            return None
        logprobs = self.names.chat(chunk.logprobs) if self.names else None
        choice = {
            "index": index,
            "delta": {
                "role": None if index in self._sent else "assistant",
                "content": text if text or not calls else None,
                "tool_calls": calls or None,
            },
            "logprobs": logprobs.model_dump() if logprobs else None,
            "finish_reason": finish_of(chunk.finish_reason, begun),
            "token_ids": self._token_ids(chunk),
        }
        self._sent[index] = self._sent.get(index, 0) + len(chunk.text)
        return self._envelope([choice])

    def whole(self, answers: list[Chunk], requests: Sequence[Request]) -> ChatCompletion:
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.body.model,
            choices=[self._choice(answer) for answer in answers],
            usage=self._usage(requests),
            metrics=self._metrics(requests),
        )

    def _choice(self, answer: Chunk) -> ChatChoice:
        text, calls = read_calls(answer.text) if self._calling else (answer.text, [])
        found = [ToolCall.model_validate(call) for call in calls]
        return ChatChoice(
            index=answer.index,
            message=AssistantMessage(content=text if text or not calls else None, tool_calls=found or None),
            logprobs=self.names and self.names.chat(answer.logprobs),
            finish_reason=finish_of(answer.finish_reason, len(calls)) or "stop",
            token_ids=self._token_ids(answer),
        )


class CompletionFormatter(Formatter):
    """Formats plain completions.

    Args:
        echoes: the text before the answers to each prompt; empty where `echo` is not asked for.
    """

    id_prefix, event_object = "cmpl", "text_completion"

    def __init__(
        self,
        body: CompletionRequest,
        names: TokenNames | None,
        echoes: Sequence[str] = (),
        *,
        acceptance: AcceptanceMetrics,
        block_size: int | None,
    ) -> None:
        super().__init__(body, names, acceptance=acceptance, block_size=block_size)
        self._echoes = echoes

    def event(self, chunk: Chunk) -> dict[str, Any] | None:
        offset, first = self._sent.get(chunk.index, 0), chunk.index not in self._sent
        text = self._echoed(chunk) if first else chunk.text
        self._sent[chunk.index] = offset
        if self._is_empty(chunk, text):
            return None
        logprobs = self.names.completion(chunk.logprobs, offset) if self.names else None
        if logprobs is not None:
            self._sent[chunk.index] = offset + sum(map(len, logprobs.tokens))
        choice = {
            "index": chunk.index,
            "text": text,
            "logprobs": logprobs.model_dump() if logprobs else None,
            "finish_reason": chunk.finish_reason,
            "token_ids": self._token_ids(chunk),
        }
        return self._envelope([choice])

    def whole(self, answers: list[Chunk], requests: Sequence[Request]) -> Completion:
        return Completion(
            id=self.id,
            created=self.created,
            model=self.body.model,
            choices=[self._choice(answer) for answer in answers],
            usage=self._usage(requests),
            metrics=self._metrics(requests),
        )

    def _echoed(self, chunk: Chunk) -> str:
        return self._echoes[chunk.index // self.body.n] + chunk.text if self._echoes else chunk.text

    def _choice(self, answer: Chunk) -> CompletionChoice:
        return CompletionChoice(
            index=answer.index,
            text=self._echoed(answer),
            logprobs=self.names and self.names.completion(answer.logprobs, 0),
            finish_reason=answer.finish_reason or "stop",
            token_ids=self._token_ids(answer),
        )
