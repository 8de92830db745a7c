"""From a validated body to requests in the engine's queue: readiness, caps, prompt, grammar, room; in this order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams

from ..engine import EmbeddedEngine
from ..grammar import Grammar, Grammars
from .api_errors import ApiError
from .batch import EngineRequest, ResponseStream
from .chat_protocol import ChatRequest
from .chat_template import encode_chat
from .formatting import ChatFormatter, CompletionFormatter, TokenNames
from .metrics import ServerMetrics
from .protocol import AcceptanceMetrics, CompletionRequest, Generation, JsonSchema, Regex
from .settings import ServerSettings
from .tools import call_grammar
from .worker import EngineWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RequestHandler:
    """Takes requests for one model: checks them and queues them at the worker."""

    def __init__(self, settings: ServerSettings, worker: EngineWorker, metrics: ServerMetrics, model: str) -> None:
        self.settings, self.worker, self.metrics, self.model = settings, worker, metrics, model
        self.draining = False
        """New requests are refused, those that run go on."""
        self._tokenizing = asyncio.Lock()
        self._grammars: Grammars | None = None

    @property
    def status(self) -> str:
        """`ready`, or why not."""
        return "draining" if self.draining else self.worker.state

    async def chat(self, body: ChatRequest, owner: str) -> tuple[ResponseStream, ChatFormatter]:
        """Queues a conversation.

        Args:
            owner: whose key the request carries; owners do not share prefixes.

        Raises:
            ApiError, UserError: what stands in the way.
        """
        engine = self._ready_engine(body)
        most = self.settings.max_messages
        if len(body.messages) > most:
            raise ApiError(400, f"{len(body.messages)} messages, at most {most} are taken", param="messages")
        params = body.sampling_params()
        names = await self._token_names(engine, params)
        formatter = ChatFormatter(body, names, acceptance=self._acceptance(body), block_size=engine.block_size)
        return await self._queue(engine, body, params, [body], owner), formatter

    async def completion(self, body: CompletionRequest, owner: str) -> tuple[ResponseStream, CompletionFormatter]:
        """Queues one prompt or several.

        Args:
            owner: whose key the request carries; owners do not share prefixes.

        Raises:
            ApiError, UserError: what stands in the way.
        """
        engine = self._ready_engine(body)
        if not 0 < len(body.prompts) <= self.settings.max_prompts:
            what = f"{len(body.prompts)} prompts, 1 to {self.settings.max_prompts} are taken"
            raise ApiError(400, what, param="prompt")
        params = body.sampling_params()
        names = await self._token_names(engine, params)
        stream = await self._queue(engine, body, params, body.prompts, owner)
        echoes = [_text(engine, prompt) for prompt in body.prompts] if body.echo else []
        acceptance, block_size = self._acceptance(body), engine.block_size
        return stream, CompletionFormatter(body, names, echoes, acceptance=acceptance, block_size=block_size)

    def _ready_engine(self, body: Generation) -> EmbeddedEngine:
        """The engine, after what can be checked before any work is spent on the request."""
        if self.status != "ready" or self.worker.engine is None:
            raise self._not_ready()
        if body.model != self.model:
            what = f"the model {body.model!r} is not served here; {self.model!r} is"
            raise ApiError(404, what, param="model", code="model_not_found")
        if body.n > self.settings.max_n:
            raise ApiError(400, f"n is {body.n}, at most {self.settings.max_n} are taken", param="n")
        return self.worker.engine

    async def _queue(
        self,
        engine: EmbeddedEngine,
        body: Generation,
        params: SamplingParams,
        prompts: Sequence[str | list[int] | ChatRequest],
        owner: str,
    ) -> ResponseStream:
        """Nothing is awaited once the requests are queued: a client that goes cannot leave them behind."""
        count = len(prompts) * body.n
        if count > self.worker.most_admitted:
            what = f"{count} answers, but batch and queue hold {self.worker.most_admitted}"
            raise ApiError(400, what, param="n")
        self._check_room(count)  # before the work below, and again after it
        async with self._tokenizing:  # the tokenizer is not made for several threads
            tokens = [await run_in_threadpool(_tokenize, engine, prompt, params) for prompt in prompts]
        grammar = await self._grammar(engine, body)
        if self.status != "ready":
            raise self._not_ready()
        self._check_room(count)
        stream = ResponseStream(count, self.worker.wake)
        salt = f"{owner}/{body.cache_salt}"
        self.worker.submit(
            [
                EngineRequest(
                    stream,
                    index,
                    tokens[index // body.n],
                    _params_of_answer(params, index % body.n),
                    salt,
                    grammar and grammar.copy(),
                )
                for index in range(count)
            ]
        )
        return stream

    async def _token_names(self, engine: EmbeddedEngine, params: SamplingParams) -> TokenNames | None:
        """What names tokens in log probabilities; None where nobody asks for them."""
        if params.logprobs is None:
            return None
        return TokenNames(engine.tokenizer, await self._load_grammars(engine))

    async def _grammar(self, engine: EmbeddedEngine, body: Generation) -> Grammar | None:
        calls = isinstance(body, ChatRequest) and bool(body.offered)
        if not calls and not body.forms:
            return None
        return await run_in_threadpool(_compiled, await self._load_grammars(engine), body)

    async def _load_grammars(self, engine: EmbeddedEngine) -> Grammars:
        """Made once, for the first request that needs it."""
        async with self._tokenizing:
            if self._grammars is None:
                config = engine.scheduler.target.config
                self._grammars = await run_in_threadpool(
                    Grammars, engine.tokenizer, config.vocab_size, config.eos_token_ids
                )
        return self._grammars

    def _acceptance(self, body: Generation) -> AcceptanceMetrics:
        return body.acceptance_metrics or self.settings.acceptance_metrics

    def _check_room(self, requests: int) -> None:
        if not self.worker.has_room(requests):
            self.metrics.refused(429)
            raise ApiError(429, "the queue is full; try again later", code="queue_full")

    def _not_ready(self) -> ApiError:
        self.metrics.refused(503)
        return ApiError(503, f"the server is not ready: {self.status}", code="not_ready")


def _compiled(grammars: Grammars, body: Generation) -> Grammar:
    """The one grammar that a request asks for."""
    if isinstance(body, ChatRequest) and body.offered:
        forced = body.tool_choice != "auto"
        text = call_grammar(body.offered, forced=forced, parallel=body.parallel_tool_calls)
        return grammars.lark(text, where="tools")
    (where,), wanted, outputs = body.forms, body.response_format, body.structured_outputs
    if body.regex is not None:
        return grammars.regex(body.regex, where=where)
    if outputs is not None:
        if outputs.json_ is not None:
            return grammars.json_schema(outputs.json_, where=where)
        if outputs.regex is not None:
            return grammars.regex(outputs.regex, where=where)
        return grammars.lark(f"start: {' | '.join(map(json.dumps, outputs.choice or ()))}", where=where)
    if isinstance(wanted, JsonSchema):
        return grammars.json_schema(wanted.json_schema.schema_, where=where)
    if isinstance(wanted, Regex):
        return grammars.regex(wanted.pattern, where=where)
    return grammars.json_schema({"type": "object"}, where=where)


def _tokenize(engine: EmbeddedEngine, prompt: str | list[int] | ChatRequest, params: SamplingParams) -> list[int]:
    """Token ids of a prompt that the scheduler would take.

    Raises:
        ApiError, UserError: it would not.
    """
    field = "messages" if isinstance(prompt, ChatRequest) else "prompt"
    if (characters := _characters(prompt)) > engine.scheduler.capacity * _longest_token(engine.tokenizer):
        what = f"{characters} characters, more than {engine.scheduler.capacity} tokens can hold"
        raise ApiError(400, what, param=field, code="context_length_exceeded")
    tokens = encode_chat(engine.tokenizer, prompt) if isinstance(prompt, ChatRequest) else engine.tokenize(prompt)
    try:
        engine.scheduler.check(tokens, params)
    except UserError as error:
        param = field if error.where == "prompt" else error.where
        code = "context_length_exceeded" if len(tokens) >= engine.scheduler.capacity else "invalid_value"
        raise ApiError(400, str(error), param=param, code=code) from None
    return tokens


def _characters(prompt: str | list[int] | ChatRequest) -> int:
    """How long its text is; 0 for token ids."""
    if isinstance(prompt, ChatRequest):
        return sum(len(message.text) for message in prompt.messages)
    return len(prompt) if isinstance(prompt, str) else 0


def _text(engine: EmbeddedEngine, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else str(engine.tokenizer.decode(prompt))


@cache
def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Characters of the longest token: a bound on what tokens can hold, so that hopeless texts are not tokenized."""
    return max(map(len, tokenizer.get_vocab()))


def _params_of_answer(params: SamplingParams, index: int) -> SamplingParams:
    """Answer `index` of n has a seed of its own, the first the one that was asked for."""
    if params.seed is None or index == 0:
        return params
    return params.model_copy(update={"seed": (params.seed + index + 2**63) % 2**64 - 2**63})
