"""Responses in OpenAI's shapes: their schemas for the OpenAPI document, and the formatters that write them.

Whole responses and the events of a stream are plain dicts from the same code: a whole response is formatted as if its
answers had come in one chunk each.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from codecs import IncrementalDecoder, getincrementaldecoder
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import time
from typing import Any, ClassVar, Literal

from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

from dflash_serve.answers.engine import Chunk, FinishReason, TokenLogprob
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

from ..answer import PendingAnswer
from ..grammar import Grammars
from ..request import Request
from .api import AcceptanceMetrics, ChatRequest, CompletionRequest, ToolCall
from .chat import CallDelta, CallReader, ChatFinishReason

# Stands for minus infinity in JSON, as in vLLM.
LOWEST = -9999.0


class CachedTokens(BaseModel):
    """Prompt tokens whose K/V was reused."""

    cached_tokens: int = 0


class DraftedTokens(BaseModel):
    """Drafted tokens, by OpenAI's names for predicted outputs: those in `completion_tokens`, and all others."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Numbers of tokens. An end-of-sequence token counts; tokens behind a stop string do not."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: DraftedTokens | None = None  # null without a drafter


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


class AssistantMessage(BaseModel):
    """The message of a whole chat answer."""

    role: Literal["assistant"]
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
    prompt_token_ids: list[int] | None = None  # As with SGLang; not in streams


class CompletionChoice(BaseModel):
    """One answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


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

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Completion(Envelope):
    """A completion response without a stream."""

    object: Literal["text_completion"]
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
        self._tokenizer, self._grammars, self._special = tokenizer, grammars, {*tokenizer.all_special_ids}

    def chat(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Log probabilities in the shape of `ChatLogprobs`."""
        content = [
            self._named(entry.token_id, entry.logprob) | {"top_logprobs": [self._named(*pair) for pair in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def completion(self, entries: Sequence[TokenLogprob], offset: int, decoder: IncrementalDecoder) -> dict[str, Any]:
        """Log probabilities in the shape of `CompletionLogprobs`, with one more `text_offset`: that of the next token.

        Args:
            offset: where in the answer the text of the first token begins, in characters.
            decoder: of the answer's bytes; a character may need several tokens, which have one offset.
        """
        raw = (
            b"" if entry.token_id in self._special else self._grammars.token_bytes(entry.token_id) for entry in entries
        )
        lengths = (len(decoder.decode(one)) if one else 0 for one in raw)
        return {
            "tokens": [self._text(entry.token_id) for entry in entries],
            "token_logprobs": [max(entry.logprob, LOWEST) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": list(accumulate(lengths, initial=offset)),
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:  # the generated token is always among them
        pairs = (*entry.top, (entry.token_id, entry.logprob))
        return {self._text(token): max(value, LOWEST) for token, value in reversed(pairs)}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._grammars.token_bytes(token)
        text = self._text(token) if token in self._special else raw.decode(errors="replace")
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(raw)}

    def _text(self, token: int) -> str:
        if token in self._special:
            return str(self._tokenizer.decode([token]))
        raw = self._grammars.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:  # a part of a character; names are keys here
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@dataclass
class Formatter(ABC):
    """Writes the response of one HTTP request.

    Args:
        body: its `n` answers to each prompt: answers `i * n` to `i * n + n - 1` share prompt `i`.
        names: writes log probabilities; None = they are not asked for.
        acceptance: figures of acceptance in the response.
        block_size: B; None without a drafter.
    """

    id_prefix: ClassVar[str]
    object: ClassVar[str]
    event_object: ClassVar[str]

    body: ChatRequest | CompletionRequest
    names: TokenNames | None
    acceptance: AcceptanceMetrics
    block_size: int | None

    def __post_init__(self) -> None:
        self.id, self.created = f"{self.id_prefix}-{secrets.token_hex(12)}", int(time())
        self._sent: dict[int, int] = {}  # characters of each begun answer's tokens that events have shown
        self._decoders = defaultdict[int, IncrementalDecoder](lambda: getincrementaldecoder("utf-8")("replace"))

    def event(self, chunk: Chunk) -> dict[str, Any] | None:
        """The event of one chunk; None where it would be empty: a step may bring half a character only."""
        text, more = self._said(chunk)
        if not (text or more or chunk.logprobs or chunk.finish_reason or self.body.return_token_ids):
            return None
        return self._envelope(self.event_object, [self._choice(chunk, text, more)])

    def whole(self, answers: Sequence[PendingAnswer]) -> dict[str, Any]:
        """The response without a stream; its answers have ended."""
        chunks = [answer.whole() for answer in answers]
        choices = [self._choice(chunk, *self._said(chunk), whole=True) for chunk in chunks]
        for choice, answer in zip(choices, answers, strict=True) if self.body.return_token_ids else ():
            request = answer.request
            choice["prompt_token_ids"] = None if request is None else request.token_ids[: request.prompt_length]
        return self._envelope(self.object, choices, answers)

    def totals(self, answers: Sequence[PendingAnswer]) -> dict[str, Any]:
        """The last event of a stream where usage was asked for: all totals, and no choices."""
        return self._envelope(self.event_object, [], answers)

    @abstractmethod
    def _said(self, chunk: Chunk) -> tuple[str, list[CallDelta]]:
        """Plain text, and pieces of calls, that a chunk adds to its answer."""

    @abstractmethod
    def _choice(self, chunk: Chunk, text: str, calls: list[CallDelta], *, whole: bool = False) -> dict[str, Any]:
        """The choice of an event or, if `whole`, of a response."""

    def _fields(
        self, chunk: Chunk, finish_reason: ChatFinishReason | None, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:  # the fields that every choice has
        token_ids = chunk.token_ids if self.body.return_token_ids else None
        return {"index": chunk.index, "logprobs": logprobs, "finish_reason": finish_reason, "token_ids": token_ids}

    def _envelope(
        self, kind: str, choices: list[dict[str, Any]], answers: Sequence[PendingAnswer] = ()
    ) -> dict[str, Any]:  # in the shape of `Envelope`, with the totals of these answers
        requests = [answer.request for answer in answers if answer.request is not None]
        return {
            "id": self.id,
            "created": self.created,
            "model": self.body.model,
            "system_fingerprint": None,
            "usage": self._usage(requests) if requests else None,
            "metrics": self._metrics(requests) if requests else None,
            "object": kind,
            "choices": choices,
        }

    def _usage(self, requests: Sequence[Request]) -> dict[str, Any]:
        of_prompts = requests[:: self.body.n]
        prompt = sum(request.prompt_length for request in of_prompts)
        completion = sum(len(request.output_ids) for request in requests)
        details = None
        if self.block_size is not None:
            drafted = int(total(request.statistics for request in requests).drafted or 0)
            accepted = sum(request.accepted_in_answer for request in requests)
            details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(request.reused for request in of_prompts)},
            "completion_tokens_details": details,
        }

    def _metrics(self, requests: Sequence[Request]) -> dict[str, Any] | None:  # null for several answers, as in vLLM
        if self.acceptance == "none":
            return None
        shown = ResponseMetrics()
        if len(requests) == 1 and self.block_size is not None:
            steps = requests[0].steps if self.acceptance == "detailed" else None
            shown.speculative_decoding = SpeculativeDecoding.of(requests[0].statistics, self.block_size, steps)
        return shown.model_dump()


@dataclass
class ChatFormatter(Formatter):
    """Formats chat completions."""

    id_prefix, object, event_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    body: ChatRequest

    def __post_init__(self) -> None:
        super().__post_init__()
        self._readers = defaultdict[int, CallReader](CallReader)  # by answer; they read where answers may call tools

    def _said(self, chunk: Chunk) -> tuple[str, list[CallDelta]]:
        if not self.body.offered:
            return chunk.text, []
        return self._readers[chunk.index].feed(chunk.text, last=chunk.finish_reason is not None)

    def _choice(self, chunk: Chunk, text: str, calls: list[CallDelta], *, whole: bool = False) -> dict[str, Any]:
        logprobs = None if self.names is None or chunk.logprobs is None else self.names.chat(chunk.logprobs)
        reader = self._readers[chunk.index]
        fields = self._fields(chunk, reader.finish_of(chunk.finish_reason), logprobs)
        role = None if chunk.index in self._sent else "assistant"
        self._sent.setdefault(chunk.index, 0)
        if not whole:
            delta = {"role": role, "content": text if text or not calls else None, "tool_calls": calls or None}
            return {**fields, "delta": delta}
        if reader.unfinished is not None:  # no call that a client could run
            text, calls = text + reader.unfinished, calls[:-1]
        content = text.rstrip() if calls else text
        found = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
        message = {"role": role, "content": content if content or not calls else None, "refusal": None}
        return {**fields, "message": message | {"tool_calls": found or None}}


@dataclass
class CompletionFormatter(Formatter):
    """Formats plain completions.

    Args:
        echoes: the text before the answers to each prompt; empty where `echo` is not asked for.
    """

    id_prefix, object, event_object = "cmpl", "text_completion", "text_completion"

    body: CompletionRequest
    echoes: Sequence[str] = ()

    def _said(self, chunk: Chunk) -> tuple[str, list[CallDelta]]:
        begins = bool(self.echoes) and chunk.index not in self._sent
        return (self.echoes[chunk.index // self.body.n] if begins else "") + chunk.text, []

    def _choice(self, chunk: Chunk, text: str, calls: list[CallDelta], *, whole: bool = False) -> dict[str, Any]:
        offset = self._sent.get(chunk.index, 0)
        logprobs = None
        if self.names is not None and chunk.logprobs is not None:
            logprobs = self.names.completion(chunk.logprobs, offset, self._decoders[chunk.index])
            offset = logprobs["text_offset"].pop()
        self._sent[chunk.index] = offset
        return self._fields(chunk, chunk.finish_reason, logprobs) | {"text": text}
