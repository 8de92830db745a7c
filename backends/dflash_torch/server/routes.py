"""The routes, all there are; and how an answer is sent: whole, or as server-sent events while it is generated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from time import time
from typing import TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dflash_serve.outputs import Chunk

from . import responses as r
from .api_errors import ApiError, AsciiJSON, ascii_json
from .batch import ResponseStream
from .chat_protocol import ChatRequest
from .formatting import Formatter
from .handler import RequestHandler
from .protocol import CompletionRequest, Generation

T = TypeVar("T")
DONE = "[DONE]"
EVENTS = {"content": {"text/event-stream": {}}, "description": "whole, or as events where `stream` is true"}


class EventStream(EventSourceResponse):
    """Events as they come, a comment where none has come for a while, and an end to generating when it is over.

    Args:
        events: the data of each event, on one line.
        stream: cancelled when the last event was sent, or the client or the server has gone.
        ping_seconds: between two comments; 0 = none are sent.
    """

    def __init__(self, events: AsyncIterator[str], stream: ResponseStream, *, ping_seconds: float) -> None:
        super().__init__(events, sep="\n", ping=ping_seconds, ping_message_factory=_ping)
        self.stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.stream.cancel()


def add_generation_routes(app: FastAPI, handler: RequestHandler) -> None:
    """Adds the routes that generate."""

    @app.post("/v1/chat/completions", responses={200: {"model": r.ChatCompletion, **EVENTS}})
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        queued = await unless_gone(request.receive, handler.chat(body, request.state.owner))
        return await respond(request, body, *queued, ping_seconds=handler.settings.ping_seconds)

    @app.post("/v1/completions", responses={200: {"model": r.Completion, **EVENTS}})
    async def completions(body: CompletionRequest, request: Request) -> Response:
        queued = await unless_gone(request.receive, handler.completion(body, request.state.owner))
        return await respond(request, body, *queued, ping_seconds=handler.settings.ping_seconds)


def add_status_routes(app: FastAPI, handler: RequestHandler) -> None:
    """Adds the routes that say what is served, and how it is."""
    started = int(time())

    @app.get("/v1/models", response_model=r.ModelList)
    async def models() -> Response:
        return _json(r.ModelList(data=[card()]))

    @app.get("/v1/models/{model:path}", response_model=r.ModelCard)
    async def model(model: str) -> Response:
        if model != handler.model:
            raise ApiError(404, f"the model {model!r} is not served here", param="model", code="model_not_found")
        return _json(card())

    @app.get("/live", response_model=r.Status)
    async def live() -> Response:
        """Liveness: 503 where only a new process would help."""
        broken = handler.worker.state == "broken"
        return _json(r.Status(status="broken" if broken else "ok"), 503 if broken else 200)

    @app.get("/health", response_model=r.Status)
    @app.get("/ready", response_model=r.Status)
    async def ready() -> Response:
        """Readiness: new requests are taken. /health means the same to clients of vLLM and SGLang."""
        return _json(r.Status(status=handler.status), 200 if handler.status == "ready" else 503)

    @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}}, response_class=Response)
    async def metrics() -> Response:
        return Response(handler.metrics.render(), media_type="text/plain; version=0.0.4")

    def card() -> r.ModelCard:
        engine = handler.worker.engine
        longest = engine.scheduler.capacity if engine else None
        return r.ModelCard(id=handler.model, created=started, max_model_len=longest)


async def respond(
    request: Request, body: Generation, stream: ResponseStream, formatter: Formatter, *, ping_seconds: float
) -> Response:
    """Waits for the first chunk before a byte is sent, so that the status is the truth."""
    chunks = aiter(stream)
    try:
        first = await unless_gone(request.receive, anext(chunks))
        if body.stream:
            events = event_data(_joined(first, chunks), formatter, stream)
            return EventStream(events, stream, ping_seconds=ping_seconds)
        answers = await unless_gone(request.receive, _whole(_joined(first, chunks)))
        return _json(formatter.whole(answers, stream.finished))
    except BaseException as error:
        stream.cancel()
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)
        raise


async def event_data(chunks: AsyncIterator[Chunk], formatter: Formatter, stream: ResponseStream) -> AsyncIterator[str]:
    """The data of a stream's events, `[DONE]` the last. An error comes too late for a status: an event says it."""
    try:
        async for chunk in chunks:
            if (event := formatter.event(chunk)) is not None:
                yield one_line(event)
        if formatter.body.stream_options.include_usage:
            yield one_line(formatter.totals(stream.finished))
    except ApiError as error:
        yield one_line(error.body)
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


def one_line(body: BaseModel) -> str:
    """The data of one event."""
    return ascii_json(body.model_dump(by_alias=True))


async def _whole(chunks: AsyncIterator[Chunk]) -> list[Chunk]:
    """Each answer's chunks joined into one, in the order of the answers."""
    whole: dict[int, Chunk] = {}
    async for chunk in chunks:
        before = whole.get(chunk.index)
        if before is not None:
            logprobs = None if chunk.logprobs is None else [*(before.logprobs or []), *chunk.logprobs]
            token_ids = before.token_ids + chunk.token_ids
            chunk = replace(chunk, text=before.text + chunk.text, token_ids=token_ids, logprobs=logprobs)
        whole[chunk.index] = chunk
    return [whole[index] for index in sorted(whole)]


async def _joined(first: Chunk, rest: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    yield first
    async for chunk in rest:
        yield chunk


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _ping() -> ServerSentEvent:
    """A comment, which clients skip: proxies close a connection that is silent for too long."""
    return ServerSentEvent(comment="ping", sep="\n")


def _json(body: BaseModel, status: int = 200) -> Response:
    return AsciiJSON(body.model_dump(by_alias=True), status)
