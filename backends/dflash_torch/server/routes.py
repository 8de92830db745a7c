"""The routes: all there are. Everything else is 404."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from time import time

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from dflash_serve.outputs import Chunk

from . import responses as r
from .errors import ApiError, AsciiJSON
from .protocol import ChatRequest, CompletionRequest
from .service import Service
from .sse import DONE, EventStream, event, unless_gone
from .ticket import Failure, News, Ticket
from .writer import Event, Whole, Writer

GENERATED = {"content": {"text/event-stream": {}}, "description": "whole, or as events where `stream` is true"}


def add_routes(app: FastAPI, service: Service) -> None:
    """Puts them all on the app."""
    started = int(time())

    @app.post("/v1/chat/completions", responses={200: {"model": r.ChatCompletion, **GENERATED}})
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        ticket, writer = await unless_gone(request.receive, service.chat(body, request.state.owner))
        return await respond(request, ticket, writer, body.stream, body.stream_options.include_usage)

    @app.post("/v1/completions", responses={200: {"model": r.Completion, **GENERATED}})
    async def completions(body: CompletionRequest, request: Request) -> Response:
        ticket, writer = await unless_gone(request.receive, service.completion(body, request.state.owner))
        return await respond(request, ticket, writer, body.stream, body.stream_options.include_usage)

    @app.get("/v1/models", response_model=r.ModelList)
    async def models() -> Response:
        return _json(r.ModelList(data=[card()]))

    @app.get("/v1/models/{model:path}", response_model=r.ModelCard)
    async def model(model: str) -> Response:
        if model != service.model:
            raise ApiError(404, f"the model {model!r} is not served here", param="model", code="model_not_found")
        return _json(card())

    @app.get("/health", response_model=r.Status)
    async def health() -> Response:
        """Liveness: only a new process would help."""
        broken = service.worker.state == "broken"
        return _json(r.Status(status="broken" if broken else "ok"), 503 if broken else 200)

    @app.get("/ready", response_model=r.Status)
    async def ready() -> Response:
        """Readiness: new requests are taken."""
        return _json(r.Status(status=service.status), 200 if service.status == "ready" else 503)

    @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}}, response_class=Response)
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4")

    def card() -> r.ModelCard:
        engine = service.worker.engine
        return r.ModelCard(
            id=service.model, created=started, max_model_len=engine.scheduler.capacity if engine else None
        )


async def respond(
    request: Request, ticket: Ticket, writer: Writer[Event, Whole], stream: bool, include_usage: bool
) -> Response:
    """Waits for the first news before a byte is sent, so that the status is the truth."""
    try:
        first = await unless_gone(request.receive, ticket.events.get())
        if isinstance(first, Failure):
            raise ApiError(first.status, first.message)
        if stream:
            return EventStream(_events(first, ticket, writer, include_usage), over=ticket.cancel)
        answers = await unless_gone(request.receive, _whole(first, ticket, writer))
        return _json(writer.whole(answers))
    except BaseException as error:
        ticket.cancel()
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)
        raise


async def _news(first: News, ticket: Ticket, writer: Writer[Event, Whole]) -> AsyncIterator[News]:
    """All news of a ticket, until its last part has ended.

    Raises:
        ApiError: a part failed.
    """
    news: News | Failure = first
    while True:
        if isinstance(news, Failure):
            raise ApiError(news.status, news.message)
        if news.ended is not None:
            writer.finished[news.chunk.index] = news.ended
        yield news
        if len(writer.finished) == len(ticket.parts):
            return
        news = await ticket.events.get()


async def _events(
    first: News, ticket: Ticket, writer: Writer[Event, Whole], include_usage: bool
) -> AsyncIterator[bytes]:
    try:
        async for news in _news(first, ticket, writer):
            chunk = news.chunk
            # A step may bring half a character only.
            if chunk.text or chunk.logprobs or chunk.finish_reason or writer.token_ids:
                yield event(writer.event(chunk))
        if include_usage:
            yield event(writer.closing())
    except ApiError as error:  # too late for a status: the last event says it
        yield event(error.body)
    yield DONE


async def _whole(first: News, ticket: Ticket, writer: Writer[Event, Whole]) -> list[Chunk]:
    """Each part's chunks joined into one."""
    whole: dict[int, Chunk] = {}
    async for news in _news(first, ticket, writer):
        chunk, before = news.chunk, whole.get(news.chunk.index)
        if before is not None:
            logprobs = None if chunk.logprobs is None else [*(before.logprobs or []), *chunk.logprobs]
            token_ids = before.token_ids + chunk.token_ids
            chunk = replace(chunk, text=before.text + chunk.text, token_ids=token_ids, logprobs=logprobs)
        whole[chunk.index] = chunk
    return [whole[index] for index in sorted(whole)]


def _json(body: BaseModel, status: int = 200) -> Response:
    return AsciiJSON(body.model_dump(by_alias=True), status)
