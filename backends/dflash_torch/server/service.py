"""From a validated request to a ticket in the queue: readiness, caps, prompt, grammar, room; in this order."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool

from dflash_serve.backend import Prompt
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams

from ..engine import EmbeddedEngine
from ..grammar import Grammar, Grammars
from .errors import ApiError
from .keys import ApiKeys
from .metrics import Metrics
from .names import TokenNames
from .protocol import ChatRequest, CompletionRequest, Generation, JsonObject, JsonSchema, Regex
from .settings import ServerSettings
from .ticket import Part, Ticket
from .worker import Worker
from .writer import ChatWriter, CompletionWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Service:
    """Everything the routes need, in one place."""

    def __init__(self, settings: ServerSettings, keys: ApiKeys, worker: Worker, metrics: Metrics, model: str) -> None:
        self.settings, self.keys, self.worker, self.metrics, self.model = settings, keys, worker, metrics, model
        self.draining = False
        self._tokenising = asyncio.Lock()
        self._tools: tuple[Grammars, TokenNames] | None = None

    @property
    def status(self) -> str:
        """`ready`, or why not."""
        return "draining" if self.draining else self.worker.state

    async def chat(self, body: ChatRequest, owner: str) -> tuple[Ticket, ChatWriter]:
        """Queues a conversation.

        Raises:
            ApiError, UserError: what stands in the way.
        """
        engine = self._check(body)
        most = self.settings.max_messages
        if len(body.messages) > most:
            raise ApiError(400, f"{len(body.messages)} messages, at most {most} are taken", param="messages")
        ticket = await self._ticket(engine, body, [[message.plain() for message in body.messages]], owner)
        return ticket, ChatWriter(self.model, self._names(engine), **self._writing(engine, body))

    async def completion(self, body: CompletionRequest, owner: str) -> tuple[Ticket, CompletionWriter]:
        """Queues one prompt or several.

        Raises:
            ApiError, UserError: what stands in the way.
        """
        engine = self._check(body)
        if not 0 < len(body.prompts) <= self.settings.max_prompts:
            what = f"{len(body.prompts)} prompts, 1 to {self.settings.max_prompts} are taken"
            raise ApiError(400, what, param="prompt")
        ticket = await self._ticket(engine, body, body.prompts, owner)
        return ticket, CompletionWriter(self.model, self._names(engine), **self._writing(engine, body))

    def _check(self, body: Generation) -> EmbeddedEngine:
        """Before any work is spent on it."""
        if self.status != "ready" or self.worker.engine is None:
            raise self._refused(503, f"the server is not ready: {self.status}", code="not_ready")
        if body.model != self.model:
            what = f"the model {body.model!r} is not served here; {self.model!r} is"
            raise ApiError(404, what, param="model", code="model_not_found")
        if body.n > self.settings.max_n:
            raise ApiError(400, f"n is {body.n}, at most {self.settings.max_n} are taken", param="n")
        return self.worker.engine

    async def _ticket(self, engine: EmbeddedEngine, body: Generation, prompts: Sequence[Prompt], owner: str) -> Ticket:
        params = SamplingParams(**body.sampling())
        count = len(prompts) * body.n
        if count > self.worker.most_admitted:
            what = f"{count} answers, but slots and queue hold {self.worker.most_admitted}"
            raise ApiError(400, what, param="n")
        if not self.worker.room_for(count):  # before the work below, and again after it
            raise self._refused(429, "the queue is full; try again later", code="queue_full")
        async with self._tokenising:  # the tokenizer is not made for several threads
            tokens = [await run_in_threadpool(_tokenise, engine, prompt, params) for prompt in prompts]
        grammar = await self._grammar(engine, body)
        parts = [
            Part(index, tokens[index // body.n], _child(params, index % body.n), grammar and grammar.copy())
            for index in range(count)
        ]
        ticket = Ticket(parts, salt=f"{owner}/{body.cache_salt}")
        if self.status != "ready":
            raise self._refused(503, f"the server is not ready: {self.status}", code="not_ready")
        if not self.worker.room_for(count):
            raise self._refused(429, "the queue is full; try again later", code="queue_full")
        self.worker.submit(ticket)
        return ticket

    async def _grammar(self, engine: EmbeddedEngine, body: Generation) -> Grammar | None:
        wanted, (grammars, _) = body.response_format, await self._load_tools(engine)
        if isinstance(wanted, JsonObject):
            return await run_in_threadpool(grammars.json_schema, {"type": "object"})
        if isinstance(wanted, JsonSchema):
            return await run_in_threadpool(grammars.json_schema, wanted.json_schema.schema_)
        if isinstance(wanted, Regex):
            return await run_in_threadpool(grammars.regex, wanted.pattern)
        return None

    async def _load_tools(self, engine: EmbeddedEngine) -> tuple[Grammars, TokenNames]:
        """Made once, with the first request."""
        async with self._tokenising:
            if self._tools is None:
                config = engine.scheduler.target.config
                eos = config.eos_token_ids
                grammars = await run_in_threadpool(Grammars, engine.tokenizer, config.vocab_size, eos)
                self._tools = grammars, TokenNames(engine.tokenizer, grammars)
        return self._tools

    def _names(self, engine: EmbeddedEngine) -> TokenNames:
        assert self._tools is not None
        return self._tools[1]

    def _writing(self, engine: EmbeddedEngine, body: Generation) -> dict[str, Any]:
        speculator = engine.scheduler.speculator
        acceptance = body.acceptance_metrics or self.settings.acceptance_metrics
        return {
            "n": body.n,
            "acceptance": acceptance,
            "block_size": speculator.block_size if speculator else 1,
            "token_ids": body.return_token_ids,
        }

    def _refused(self, status: int, message: str, *, code: str) -> ApiError:
        self.metrics.refused(status)
        return ApiError(status, message, code=code)


def _tokenise(engine: EmbeddedEngine, prompt: Prompt, params: SamplingParams) -> list[int]:
    chat = bool(prompt) and not isinstance(prompt, str) and isinstance(prompt[0], Mapping)
    if (characters := _characters(prompt)) > engine.scheduler.capacity * _longest_token(engine.tokenizer):
        what = f"{characters} characters, more than {engine.scheduler.capacity} tokens can hold"
        raise ApiError(400, what, param="messages" if chat else "prompt", code="context_length_exceeded")
    tokens = engine.tokenize(prompt)
    try:
        engine.scheduler.check(tokens, params)
    except UserError as error:
        param = "messages" if chat and error.where == "prompt" else error.where
        code = "context_length_exceeded" if len(tokens) >= engine.scheduler.capacity else "invalid_value"
        raise ApiError(400, str(error), param=param, code=code) from None
    return tokens


def _characters(prompt: Prompt) -> int:
    """Of its text; 0 for token ids."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(message["content"]) for message in prompt if isinstance(message, Mapping))


@cache
def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """In characters: a bound on what a number of tokens can hold, so that hopeless texts are not tokenised."""
    return max(map(len, tokenizer.get_vocab()))


def _child(params: SamplingParams, index: int) -> SamplingParams:
    """Answer `index` of n: a seed of its own, the first the one that was asked for."""
    if params.seed is None or index == 0:
        return params
    return params.model_copy(update={"seed": (params.seed + index + 2**63) % 2**64 - 2**63})
