"""From the validated body of a request to answers in the engine's loop, and from their chunks to HTTP.

A body is checked in this order: readiness, limits, prompt, grammar, room in the queue. Its JSON is read in `body`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from dflash_serve.answers.chat_template import encode_text
from dflash_serve.answers.engine import Chunk
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams

from ..answer import PendingAnswer
from ..engine import EmbeddedEngine
from ..grammar import Grammar, Grammars
from .api import ApiError, ChatRequest, CompletionRequest, Form
from .chat import call_grammar, render_chat
from .recording import DAY, Recorder
from .responses import ChatFormatter, CompletionFormatter, Formatter, TokenNames
from .settings import ServerSettings
from .worker import EngineWorker, ResponseStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
Body = ChatRequest | CompletionRequest
DONE = "[DONE]"


def ascii_json(content: Any) -> str:
    """JSON in ASCII on one line: some clients take U+2028 and its like for the end of a line of an event stream."""
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


class AsciiJSON(JSONResponse):
    """A response in ASCII JSON, which can repeat any text of a request, lone surrogates included."""

    def render(self, content: Any) -> bytes:
        return ascii_json(content).encode("ascii")


class EventStream(EventSourceResponse):
    """An event stream: events as they come, comments in long gaps; its answers are cancelled when it is over.

    Args:
        events: the data of each event, on one line.
        stream: cancelled after the last event, or when the client or the server has gone.
        ping_seconds: time between two comments; 0 = no comments.
    """

    def __init__(self, events: AsyncIterator[str], stream: ResponseStream, *, ping_seconds: float) -> None:
        # Proxies close a connection without traffic.
        comment = partial(ServerSentEvent, comment="ping", sep="\n")
        super().__init__(events, sep="\n", ping=ping_seconds, ping_message_factory=comment)
        self.stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.stream.cancel()


class RequestHandler:
    """Checks requests for one model, queues them and sends their answers."""

    def __init__(self, settings: ServerSettings, worker: EngineWorker) -> None:
        self.settings, self.worker, self.model = settings, worker, worker.model
        self.draining = False  # new requests are refused; running ones go on
        self.recorder = recorder_of(settings)
        self._tokenizing = asyncio.Lock()
        self._grammars: Grammars | None = None

    @property
    def status(self) -> str:
        """`ready`, or why not."""
        return "draining" if self.draining else self.worker.state

    async def respond(self, body: Body, request: Request) -> Response:
        """Waits for the first chunk before a byte is sent, so that an error before it has its own status."""
        try:
            # Owners of different API keys do not share prefixes.
            stream, formatter = await unless_gone(request.receive, self._queue(body, request.state.owner))
        except ClientDisconnect:
            return Response(status_code=499)
        chunks = aiter(stream)
        if self.recorder is not None and isinstance(body, ChatRequest):
            chunks = _recorded(chunks, self.recorder, body, stream)
        try:
            first = await unless_gone(request.receive, anext(chunks))
            if body.stream:
                events = event_data(_joined(first, chunks), formatter, stream)
                return EventStream(events, stream, ping_seconds=self.settings.ping_seconds)
            await unless_gone(request.receive, _exhaust(chunks))
            return AsciiJSON(formatter.whole(stream.answers))
        except BaseException as error:
            stream.cancel()
            if isinstance(error, ClientDisconnect):
                return Response(status_code=499)
            raise

    async def _queue(self, body: Body, owner: str) -> tuple[ResponseStream, Formatter]:
        """Queues the answers. Nothing is awaited after that: a client that goes cannot leave them behind."""
        engine = self._ready_engine(body)
        prompts = self._prompts(body)
        params, count = body.sampling_params(), len(prompts) * body.n
        is_constrained = bool(body.forms) or (isinstance(body, ChatRequest) and bool(body.offered))
        if count > self.worker.most_admitted:
            what = f"{count} answers, but batch and queue hold {self.worker.most_admitted}"
            raise ApiError(400, what, param="n")
        self._check_room(count)  # before the work below, and after it
        async with self._tokenizing:  # the tokenizer is not thread-safe
            tokens = [await run_in_threadpool(_tokenize, engine, prompt, params) for prompt in prompts]
            grammars = self._grammars
            if grammars is None and (is_constrained or params.logprobs is not None):
                target = engine.scheduler.target.config
                make = partial(Grammars, engine.tokenizer, target.vocab_size, target.eos_token_ids)
                grammars = self._grammars = await run_in_threadpool(make)
        grammar = await run_in_threadpool(_compiled, grammars, body) if grammars and is_constrained else None
        if self.status != "ready":
            raise self._not_ready()
        self._check_room(count)
        stream, salt = ResponseStream(self.worker.wake), f"{owner}/{body.cache_salt}"
        for index in range(count):
            answer = PendingAnswer(
                index,
                tokens[index // body.n],
                _params_of_answer(params, index % body.n),
                self.worker.deliver,
                grammar=grammar and grammar.copy(),
                salt=salt,
                group=stream,
            )
            stream.answers.append(answer)
        names = TokenNames(engine.tokenizer, grammars) if grammars and params.logprobs is not None else None
        formatter = self._formatter(engine, body, names)
        self.worker.submit(stream.answers)
        return stream, formatter

    def _prompts(self, body: Body) -> Sequence[str | list[int] | ChatRequest]:
        if isinstance(body, ChatRequest):
            return [body]
        if not 0 < len(body.prompts) <= self.settings.max_prompts:
            what = f"{len(body.prompts)} prompts, 1 to {self.settings.max_prompts} are taken"
            raise ApiError(400, what, param="prompt")
        return body.prompts

    def _formatter(self, engine: EmbeddedEngine, body: Body, names: TokenNames | None) -> Formatter:
        acceptance = body.acceptance_metrics or self.settings.acceptance_metrics
        if isinstance(body, ChatRequest):
            return ChatFormatter(body, names, acceptance, engine.block_size)
        texts = (each if isinstance(each, str) else str(engine.tokenizer.decode(each)) for each in body.prompts)
        return CompletionFormatter(body, names, acceptance, engine.block_size, [*texts] if body.echo else [])

    def _ready_engine(self, body: Body) -> EmbeddedEngine:
        if self.status != "ready" or self.worker.engine is None:
            raise self._not_ready()
        if body.model != self.model:
            what = f"the model {body.model!r} is not served here; {self.model!r} is"
            raise ApiError(404, what, param="model", code="model_not_found")
        if body.n > self.settings.max_n:
            raise ApiError(400, f"n is {body.n}, at most {self.settings.max_n} are taken", param="n")
        return self.worker.engine

    def _check_room(self, requests: int) -> None:
        if not self.worker.has_room(requests):
            self.worker.metrics.refused(429)
            raise ApiError(429, "the queue is full; try again later", code="queue_full")

    def _not_ready(self) -> ApiError:
        self.worker.metrics.refused(503)
        return ApiError(503, f"the server is not ready: {self.status}", code="not_ready")


def recorder_of(settings: ServerSettings) -> Recorder | None:
    """The recorder that the settings ask for; None = nothing is recorded.

    Raises:
        UserError: its folder cannot be written.
    """
    if settings.record_to is None:
        return None
    return Recorder(settings.record_to, settings.record_megabytes * 1_000_000, settings.record_days * DAY)


async def _recorded(
    chunks: AsyncIterator[Chunk], recorder: Recorder, body: ChatRequest, stream: ResponseStream
) -> AsyncIterator[Chunk]:
    async for chunk in chunks:
        yield chunk
    await run_in_threadpool(recorder.add, body, stream.answers[0])


def _compiled(grammars: Grammars, body: Body) -> Grammar:
    if isinstance(body, ChatRequest) and body.offered:
        forced = body.tool_choice != "auto"
        text = call_grammar(body.offered, forced=forced, parallel=body.parallel_tool_calls)
        return grammars.lark(text, where="tools")
    ((where, (form, source)),) = body.forms.items()
    compilers: dict[Form, Callable[..., Grammar]] = {
        "json_schema": grammars.json_schema,
        "regex": grammars.regex,
        "lark": grammars.lark,
    }
    return compilers[form](source, where=where)


def _tokenize(engine: EmbeddedEngine, prompt: str | list[int] | ChatRequest, params: SamplingParams) -> list[int]:
    """Token ids of a prompt that the scheduler accepts.

    Raises:
        ApiError, UserError: it does not accept them.
    """
    field = "messages" if isinstance(prompt, ChatRequest) else "prompt"
    text = render_chat(engine.tokenizer, prompt) if isinstance(prompt, ChatRequest) else prompt
    # Before it is encoded, which takes seconds for a long text, and makes others wait.
    if isinstance(text, str) and len(text) > engine.scheduler.capacity * _longest_token(engine.tokenizer):
        what = f"{len(text)} characters, more than {engine.scheduler.capacity} tokens can hold"
        raise ApiError(400, what, param=field, code="context_length_exceeded")
    if isinstance(prompt, ChatRequest):
        tokens = encode_text(engine.tokenizer, str(text), special=False)
    else:
        tokens = engine.tokenize(prompt)
    try:
        engine.scheduler.check(tokens, params)
    except UserError as error:
        param = field if error.where == "prompt" else error.where
        code = "context_length_exceeded" if len(tokens) >= engine.scheduler.capacity else "invalid_value"
        raise ApiError(400, str(error), param=param, code=code) from None
    return tokens


@cache
def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int:  # in characters
    return max(map(len, tokenizer.get_vocab()))


def _params_of_answer(params: SamplingParams, index: int) -> SamplingParams:  # each of n answers has its own seed
    if params.seed is None or index == 0:
        return params
    return params.model_copy(update={"seed": (params.seed + index + 2**63) % 2**64 - 2**63})


async def event_data(chunks: AsyncIterator[Chunk], formatter: Formatter, stream: ResponseStream) -> AsyncIterator[str]:
    """The data of a stream's events, `[DONE]` the last. An error, too late for a status, is an event."""
    try:
        async for chunk in chunks:
            if (event := formatter.event(chunk)) is not None:
                yield ascii_json(event)
        if formatter.body.stream_options.include_usage:
            yield ascii_json(formatter.totals(stream.answers))
    except ApiError as error:
        yield ascii_json(error.body.model_dump())
    yield DONE


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, unless the client goes first: then the work is cancelled.

    Raises:
        ClientDisconnect: the client is gone.
    """
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _exhaust(chunks: AsyncIterator[Chunk]) -> None:
    async for _ in chunks:
        pass


async def _joined(first: Chunk, rest: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    yield first
    async for chunk in rest:
        yield chunk


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
