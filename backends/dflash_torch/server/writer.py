"""From a request's chunks to its response: whole, or event by event."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from time import time
from typing import Generic, TypeVar

from dflash_serve.outputs import Chunk

from ..request import Request
from . import responses as r
from .acceptance import acceptance_of
from .names import TokenNames
from .settings import AcceptanceMetrics

Event = TypeVar("Event", bound=r.Envelope)
Whole = TypeVar("Whole", bound=r.Envelope)


class Writer(ABC, Generic[Event, Whole]):
    """One a request.

    Args:
        n: answers to each prompt; answers `i * n` to `i * n + n - 1` share a prompt.
        block_size: B; 1 without a drafter.
        token_ids: choices carry them.
    """

    prefix: str

    def __init__(
        self,
        model: str,
        names: TokenNames,
        *,
        n: int,
        acceptance: AcceptanceMetrics,
        block_size: int,
        token_ids: bool = False,
    ) -> None:
        self.model, self.names, self.n, self.acceptance, self.block_size = model, names, n, acceptance, block_size
        self.token_ids = token_ids
        self.id, self.created = f"{self.prefix}-{secrets.token_hex(12)}", int(time())
        self.finished: dict[int, Request] = {}
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}

    @abstractmethod
    def event(self, chunk: Chunk) -> Event:
        """A piece of one answer."""

    @abstractmethod
    def closing(self) -> Event:
        """The last event where usage was asked for: no choices, all totals."""

    @abstractmethod
    def whole(self, answers: list[Chunk]) -> Whole:
        """The response without a stream; each answer is all its chunks in one."""

    def _ids(self, chunk: Chunk) -> list[int] | None:
        return chunk.token_ids if self.token_ids else None

    def _usage(self) -> r.Usage:
        prompts = [request for index, request in self.finished.items() if index % self.n == 0]
        prompt = sum(request.prompt_length for request in prompts)
        completion = sum(len(request.output_ids) for request in self.finished.values())
        return r.Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=r.CachedTokens(cached_tokens=sum(request.reused for request in prompts)),
        )

    def _metrics(self) -> r.ResponseMetrics | None:
        """Null for several answers, as with vLLM: acceptance belongs to one."""
        if self.acceptance == "none":
            return None
        if len(self.finished) != 1 or self.block_size < 2:
            return r.ResponseMetrics()
        (request,) = self.finished.values()
        acceptance = acceptance_of(request, self.block_size, detailed=self.acceptance == "detailed")
        return r.ResponseMetrics(speculative_decoding=acceptance)


class ChatWriter(Writer[r.ChatCompletionChunk, r.ChatCompletion]):
    """Chat completions."""

    prefix = "chatcmpl"

    def event(self, chunk: Chunk) -> r.ChatCompletionChunk:
        choice = r.ChatChunkChoice(
            index=chunk.index,
            delta=r.Delta(role=None if chunk.index in self._begun else "assistant", content=chunk.text),
            logprobs=self.names.chat(chunk.logprobs),
            finish_reason=chunk.finish_reason,
            token_ids=self._ids(chunk),
        )
        self._begun.add(chunk.index)
        return r.ChatCompletionChunk(id=self.id, created=self.created, model=self.model, choices=[choice])

    def closing(self) -> r.ChatCompletionChunk:
        return r.ChatCompletionChunk(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[],
            usage=self._usage(),
            metrics=self._metrics(),
        )

    def whole(self, answers: list[Chunk]) -> r.ChatCompletion:
        choices = [
            r.ChatChoice(
                index=answer.index,
                message=r.AssistantMessage(content=answer.text),
                logprobs=self.names.chat(answer.logprobs),
                finish_reason=answer.finish_reason or "stop",
                token_ids=self._ids(answer),
            )
            for answer in answers
        ]
        return r.ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self._usage(),
            metrics=self._metrics(),
        )


class CompletionWriter(Writer[r.Completion, r.Completion]):
    """Plain completions."""

    prefix = "cmpl"

    def event(self, chunk: Chunk) -> r.Completion:
        choice = self._choice(chunk, self._offsets.get(chunk.index, 0))
        if choice.logprobs is not None:
            self._offsets[chunk.index] = self._offsets.get(chunk.index, 0) + sum(map(len, choice.logprobs.tokens))
        return r.Completion(id=self.id, created=self.created, model=self.model, choices=[choice])

    def closing(self) -> r.Completion:
        return self.whole([])

    def whole(self, answers: list[Chunk]) -> r.Completion:
        return r.Completion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._choice(answer, 0) for answer in answers],
            usage=self._usage(),
            metrics=self._metrics(),
        )

    def _choice(self, chunk: Chunk, offset: int) -> r.CompletionChoice:
        return r.CompletionChoice(
            index=chunk.index,
            text=chunk.text,
            logprobs=self.names.completion(chunk.logprobs, offset),
            finish_reason=chunk.finish_reason,
            token_ids=self._ids(chunk),
        )
