"""From an answer's chunks to the response's shapes: whole, or event by event."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import time

from transformers import PreTrainedTokenizerBase

from dflash_serve.outputs import Chunk, TokenLogprob

from ..grammar import Grammars
from ..request import Request
from . import responses as r
from .chat_protocol import ChatRequest
from .protocol import AcceptanceMetrics, CompletionRequest, Generation
from .tools import CallReader, finish_of, read_calls

LOWEST = -9999.0
"""What JSON gets for minus infinity, as from vLLM."""


class TokenNames:
    """Log probabilities with their tokens as text and bytes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, grammars: Grammars) -> None:
        self._tokenizer, self._grammars = tokenizer, grammars

    def chat(self, entries: Sequence[TokenLogprob] | None) -> r.ChatLogprobs | None:
        """Log probabilities in the shape of chat completions."""
        if entries is None:
            return None
        content = []
        for entry in entries:
            top = [self._named(token, value) for token, value in entry.top]
            own = self._named(entry.token_id, entry.logprob)
            content.append(r.TokenLogprobs(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top))
        return r.ChatLogprobs(content=content)

    def completion(self, entries: Sequence[TokenLogprob] | None, offset: int) -> r.CompletionLogprobs | None:
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
        return r.CompletionLogprobs(
            tokens=[own.token for own in named],
            token_logprobs=[own.logprob for own in named],
            top_logprobs=[self._top(entry) for entry in entries],
            text_offset=offsets,
        )

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The most probable tokens, and the generated one where it is not among them."""
        named = [self._named(*pair) for pair in (*entry.top, (entry.token_id, entry.logprob))]
        return {own.token: own.logprob for own in reversed(named)}

    def _named(self, token: int, logprob: float) -> r.TopLogprob:
        text = str(self._tokenizer.decode([token]))
        value = max(logprob, LOWEST)
        return r.TopLogprob(token=text, logprob=value, bytes=list(self._grammars.token_bytes(token)))


class Formatter(ABC):
    """Writes the response of one HTTP request.

    Args:
        body: its `n` answers to each prompt: answers `i * n` to `i * n + n - 1` share a prompt.
        acceptance: how much of it the response shows.
        block_size: B; None without a drafter.
    """

    id_prefix: str

    def __init__(
        self, body: Generation, names: TokenNames | None, *, acceptance: AcceptanceMetrics, block_size: int | None
    ) -> None:
        self.body, self.names, self.acceptance, self.block_size = body, names, acceptance, block_size
        self.id, self.created = f"{self.id_prefix}-{secrets.token_hex(12)}", int(time())
        self._sent: dict[int, int] = {}
        """Characters of each answer's tokens that events have shown; an answer that has not begun is missing."""

    def _says_nothing(self, chunk: Chunk, text: str) -> bool:
        return not (text or chunk.logprobs or chunk.finish_reason or self.body.return_token_ids)

    @abstractmethod
    def event(self, chunk: Chunk) -> r.Envelope | None:
        """The event of one chunk; None where it says nothing: a step may bring half a character only."""

    @abstractmethod
    def totals(self, finished: Mapping[int, Request]) -> r.Envelope:
        """The last event where usage was asked for: no choices, all totals."""

    @abstractmethod
    def whole(self, answers: list[Chunk], finished: Mapping[int, Request]) -> r.Envelope:
        """The response without a stream; each answer is all its chunks in one.

        Args:
            finished: the scheduler's requests, by the index of their answer.
        """

    def _token_ids(self, chunk: Chunk) -> list[int] | None:
        return chunk.token_ids if self.body.return_token_ids else None

    def _usage(self, finished: Mapping[int, Request]) -> r.Usage:
        prompts = [request for index, request in finished.items() if index % self.body.n == 0]
        prompt = sum(request.prompt_length for request in prompts)
        completion = sum(len(request.output_ids) for request in finished.values())
        return r.Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=r.CachedTokens(cached_tokens=sum(request.reused for request in prompts)),
        )

    def _metrics(self, finished: Mapping[int, Request]) -> r.ResponseMetrics | None:
        """Null for several answers, as with vLLM: acceptance belongs to one."""
        if self.acceptance == "none":
            return None
        if len(finished) != 1 or self.block_size is None:
            return r.ResponseMetrics()
        (request,) = finished.values()
        steps = request.steps if self.acceptance == "detailed" else None
        return r.ResponseMetrics(
            speculative_decoding=r.SpeculativeDecoding.of(request.statistics, self.block_size, steps)
        )


class ChatFormatter(Formatter):
    """Formats chat completions."""

    id_prefix = "chatcmpl"

    def __init__(
        self, body: ChatRequest, names: TokenNames | None, *, acceptance: AcceptanceMetrics, block_size: int | None
    ) -> None:
        super().__init__(body, names, acceptance=acceptance, block_size=block_size)
        self._calling = bool(body.offered)
        self._readers = defaultdict[int, CallReader](CallReader)
        """Of each answer that may call tools."""

    def event(self, chunk: Chunk) -> r.ChatCompletionChunk | None:
        text, calls, reason = chunk.text, list[r.CallDelta](), chunk.finish_reason
        if self._calling:
            reader = self._readers[chunk.index]
            text, calls = reader.feed(text, last=reason is not None)
        if not calls and self._says_nothing(chunk, text):
            return None
        delta = r.Delta(
            role=None if chunk.index in self._sent else "assistant",
            content=text if text or not calls else None,
            tool_calls=calls or None,
        )
        choice = r.ChatChunkChoice(
            index=chunk.index,
            delta=delta,
            logprobs=self.names and self.names.chat(chunk.logprobs),
            finish_reason=finish_of(reason, self._readers[chunk.index].calls if self._calling else 0),
            token_ids=self._token_ids(chunk),
        )
        self._sent[chunk.index] = self._sent.get(chunk.index, 0) + len(chunk.text)
        return r.ChatCompletionChunk(id=self.id, created=self.created, model=self.body.model, choices=[choice])

    def totals(self, finished: Mapping[int, Request]) -> r.ChatCompletionChunk:
        return r.ChatCompletionChunk(
            id=self.id,
            created=self.created,
            model=self.body.model,
            choices=[],
            usage=self._usage(finished),
            metrics=self._metrics(finished),
        )

    def whole(self, answers: list[Chunk], finished: Mapping[int, Request]) -> r.ChatCompletion:
        return r.ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.body.model,
            choices=[self._choice(answer) for answer in answers],
            usage=self._usage(finished),
            metrics=self._metrics(finished),
        )

    def _choice(self, answer: Chunk) -> r.ChatChoice:
        text, calls = read_calls(answer.text) if self._calling else (answer.text, [])
        return r.ChatChoice(
            index=answer.index,
            message=r.AssistantMessage(content=text if text or not calls else None, tool_calls=calls or None),
            logprobs=self.names and self.names.chat(answer.logprobs),
            finish_reason=finish_of(answer.finish_reason, len(calls)) or "stop",
            token_ids=self._token_ids(answer),
        )


class CompletionFormatter(Formatter):
    """Formats plain completions.

    Args:
        echoes: the text that goes before the answers to each prompt; none where it is not asked for.
    """

    id_prefix = "cmpl"

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

    def event(self, chunk: Chunk) -> r.Completion | None:
        offset, first = self._sent.get(chunk.index, 0), chunk.index not in self._sent
        chunk = self._echoed(chunk) if first else chunk
        self._sent[chunk.index] = offset
        if self._says_nothing(chunk, chunk.text):
            return None
        choice = self._choice(chunk, offset)
        if choice.logprobs is not None:
            self._sent[chunk.index] = offset + sum(map(len, choice.logprobs.tokens))
        return r.Completion(id=self.id, created=self.created, model=self.body.model, choices=[choice])

    def totals(self, finished: Mapping[int, Request]) -> r.Completion:
        return self.whole([], finished)

    def whole(self, answers: list[Chunk], finished: Mapping[int, Request]) -> r.Completion:
        return r.Completion(
            id=self.id,
            created=self.created,
            model=self.body.model,
            choices=[self._choice(self._echoed(answer), 0) for answer in answers],
            usage=self._usage(finished),
            metrics=self._metrics(finished),
        )

    def _echoed(self, chunk: Chunk) -> Chunk:
        return replace(chunk, text=self._echoes[chunk.index // self.body.n] + chunk.text) if self._echoes else chunk

    def _choice(self, chunk: Chunk, offset: int) -> r.CompletionChoice:
        return r.CompletionChoice(
            index=chunk.index,
            text=chunk.text,
            logprobs=self.names and self.names.completion(chunk.logprobs, offset),
            finish_reason=chunk.finish_reason,
            token_ids=self._token_ids(chunk),
        )
