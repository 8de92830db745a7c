"""The application and the server around it: admission of requests, status routes, errors, and the drain."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from time import time
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from sse_starlette.sse import AppStatus
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_serve.common.key_guard import KeyGuard, drain
from dflash_serve.errors import UserError, first_line

from . import responses as r
from .api import ApiError, ChatRequest, CompletionRequest, ErrorBody
from .body import JSONRoute
from .drafters import add_drafter_routes
from .routes import AsciiJSON, RequestHandler
from .settings import ServerSettings

log = logging.getLogger(__name__)
TICK_SECONDS = 0.05
TICKS_TO_EXPIRE = 1200  # a minute between two looks for records that are too old
RETRY_SECONDS = {429: "1", 503: "5"}
# Probes and Prometheus have no key, as with vLLM and SGLang.
OPEN_PATHS = frozenset({"/health", "/ready", "/live", "/metrics"})
EVENTS = {"content": {"text/event-stream": {}}, "description": "whole, or as events where `stream` is true"}
# Error responses of every route in the OpenAPI document; 4XX keeps FastAPI from adding its own 422.
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 405, 408, 413, 415, 429, 431, "4XX", 500, 503)
}


class AdmissionMiddleware:
    """Refuses a request before it reaches a route: for its headers, or the type or size of its body.

    A refusal ends the connection. Pure ASGI, so that a route's `receive` sees the client disconnect.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            self._check_head(scope)
            body = await self._body(receive)
        except ApiError as error:
            await drain(scope, receive)
            response = _response(error)
            response.headers["Connection"] = "close"
            return await response(scope, receive, send)
        if body is not None:  # None = the client is gone, or too slow
            await self.app(scope, _replay(body, receive), send)

    def _check_head(self, scope: Scope) -> None:
        headers, most = scope["headers"], self.settings.max_body_bytes
        named = {name: value.decode("latin-1") for name, value in reversed(headers)}
        if sum(len(name) + len(value) for name, value in headers) > self.settings.max_header_bytes:
            raise ApiError(431, f"the headers are larger than {self.settings.max_header_bytes} bytes")
        if {b"content-length", b"transfer-encoding"} <= named.keys():
            # A proxy that goes by the other of the two would take a part of the body for a request (RFC 9112, 6.1).
            raise ApiError(400, "Content-Length and Transfer-Encoding: send one of them", code="ambiguous_length")
        media_type = named.get(b"content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and media_type != "application/json":
            what = f"the body's type is {media_type!r}; send it as `Content-Type: application/json`"
            raise ApiError(415, what, code="unsupported_media_type")
        if int(named.get(b"content-length", "0")[:20]) > most:
            raise _too_large(most)

    async def _body(self, receive: Receive) -> bytes | None:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self.settings.max_body_bytes:
                raise _too_large(self.settings.max_body_bytes)
            if not message.get("more_body", False):
                return bytes(body)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes", code="body_too_large")


class TimedProtocol(H11Protocol):
    """uvicorn's protocol with a limit on the time in which a request comes, head and body.

    A connection whose head does not come is closed; one whose body does not come is answered with 408, and closed.
    """

    def __init__(self, *args: Any, seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None  # runs while a request is not whole

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _watch(self) -> None:
        is_incomplete = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if is_incomplete and self._timer is None:
            self._timer = self.loop.call_later(self._seconds, self._too_slow)
        elif not is_incomplete and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if self.conn.our_state is h11.SEND_RESPONSE:
            told = _response(ApiError(408, f"the body did not come within {self._seconds:g} seconds"))
            head = h11.Response(status_code=408, headers=[*told.raw_headers, (b"connection", b"close")])
            for event in (head, h11.Data(data=bytes(told.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def add_status_routes(app: FastAPI, handler: RequestHandler) -> None:
    """Adds the routes of the models, the probes and the metrics."""
    started = int(time())

    @app.get("/v1/models")
    async def models() -> r.ModelList:
        return r.ModelList(data=[card()])

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> r.ModelCard:
        if model != handler.model:
            raise ApiError(404, f"the model {model!r} is not served here", param="model", code="model_not_found")
        return card()

    @app.get("/live")
    async def live(response: Response) -> r.Status:
        """Liveness: 503 where only a new process helps."""
        broken = handler.worker.state == "broken"
        response.status_code = 503 if broken else 200
        return r.Status(status="broken" if broken else "ok")

    @app.get("/health")
    @app.get("/ready")
    async def ready(response: Response) -> r.Status:
        """Readiness: new requests are accepted. Clients of vLLM and SGLang ask /health."""
        response.status_code = 200 if handler.status == "ready" else 503
        return r.Status(status=handler.status)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(handler.worker.metrics.render(), media_type="text/plain; version=0.0.4")

    def card() -> r.ModelCard:
        engine = handler.worker.engine
        longest = engine.scheduler.capacity if engine else None
        return r.ModelCard(id=handler.model, created=started, max_model_len=longest)


def create_app(handler: RequestHandler) -> FastAPI:
    """The application without its middleware, for the OpenAPI document."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        handler.worker.launch_from(asyncio.get_running_loop())
        yield
        handler.worker.stop()

    app = FastAPI(
        title="dflash-serve",
        version=version("dflash-serve"),
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses=ERRORS,
    )
    app.state.settings, app.router.route_class = handler.settings, JSONRoute
    for kind in (
        ApiError,
        UserError,
        RequestValidationError,
        ValidationError,
        HTTPException,
        RecursionError,
        Exception,
    ):
        app.add_exception_handler(kind, _error_response)
    add_status_routes(app, handler)

    @app.post("/v1/chat/completions", responses={200: {"model": r.ChatCompletion, **EVENTS}})
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await handler.respond(body, request)

    @app.post("/v1/completions", responses={200: {"model": r.Completion, **EVENTS}})
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await handler.respond(body, request)

    add_drafter_routes(app, handler)
    return app


class DrainingServer(uvicorn.Server):
    """uvicorn with another drain: the listener stays open and answers with 503 until the last answer is sent."""

    def __init__(self, config: uvicorn.Config, handler: RequestHandler) -> None:
        super().__init__(config)
        self.handler, self.exit_code = handler, 0
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second stops at once."""
        self._signals += 1
        self.handler.draining = True
        if self._signals > 1:
            log.warning("second signal: stopping at once")
            os._exit(1)

    async def main_loop(self) -> None:
        """Runs until a signal and the end of the drain, or until the engine cannot be started."""
        clock, worker, ticks = asyncio.get_running_loop(), self.handler.worker, 0
        announced = False
        while True:
            if worker.state == "ready" and not announced:  # even where it is to end by now
                announced = True
                log.info("ready: %s answers on %s", self.handler.model, ", ".join(self._addresses()))
            if self.handler.draining or worker.state == "broken":
                break
            await self.on_tick(ticks)
            ticks += 1
            if self.handler.recorder is not None and ticks % TICKS_TO_EXPIRE == 1:
                await asyncio.to_thread(self.handler.recorder.expire)
            await asyncio.sleep(TICK_SECONDS)
        if worker.state == "broken":
            self.exit_code = 1
            return
        log.info("draining: %d requests are still to be answered", worker.admitted)
        deadline = clock.time() + self.handler.settings.drain_seconds
        while worker.admitted and clock.time() < deadline:
            await asyncio.sleep(TICK_SECONDS)
        if worker.admitted:
            log.warning("the drain's %g seconds are over", self.handler.settings.drain_seconds)
            self.exit_code = 1
            await asyncio.to_thread(worker.stop)  # which ends the waiting requests with a 503

    def _addresses(self) -> Iterator[str]:
        for listener in self.servers:
            for each in listener.sockets:
                host, port = each.getsockname()[:2]
                yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_of(handler: RequestHandler, keys: Sequence[str]) -> DrainingServer:
    """uvicorn around the application, without the parts that this server does itself.

    Args:
        keys: API keys; none = the server is open to all.
    """
    AppStatus.enable_automatic_graceful_drain = False  # it would cut streams at SIGTERM; the drain lets them end
    settings = handler.settings
    config = uvicorn.Config(
        KeyGuard(AdmissionMiddleware(create_app(handler), settings), keys, OPEN_PATHS),
        http=partial(TimedProtocol, seconds=settings.body_seconds),  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=settings.max_header_bytes + 1024,  # h11 cuts off beyond
        timeout_graceful_shutdown=2,
    )
    return DrainingServer(config, handler)


async def _error_response(request: Request, error: Exception) -> Response:  # in OpenAI's shape
    if isinstance(error.__cause__, ApiError):  # of the body's JSON, wrapped by FastAPI
        error = error.__cause__
    if isinstance(error, ApiError):
        return _response(error)
    if isinstance(error, UserError):
        return _response(ApiError(400, str(error), param=error.where or None, code="invalid_value"))
    if isinstance(error, RequestValidationError | ValidationError):
        return _response(_invalid_body(error.errors(), getattr(error, "body", None)))
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError | ValueError):
        why = first_line(error.__cause__) if isinstance(error.__cause__, ValueError) else "it is nested too deeply"
        return _response(ApiError(400, f"the body is no JSON that can be read: {why}", code="invalid_json"))
    if isinstance(error, HTTPException):
        told = str(error.detail)
        if error.status_code == 404:
            there = dict.fromkeys(route.path for route in request.app.routes if isinstance(route, APIRoute))
            told = f"{request.url.path} is not served; these are: {', '.join(there)}"
        response = _response(ApiError(error.status_code, told))
        response.headers.update(error.headers or {})
        return response
    return _response(ApiError(500, "an internal error; the server's log says more"))


def _response(error: ApiError) -> Response:
    retry = RETRY_SECONDS.get(error.status)
    return AsciiJSON(error.body.model_dump(), error.status, headers={"Retry-After": retry} if retry else None)


def _invalid_body(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    first = errors[0]
    if first["type"] == "json_invalid":  # its location is a character, not a field
        why = first.get("ctx", {}).get("error", "cut short")
        return ApiError(400, f"the body is no JSON: {why} (character {first['loc'][-1]})", code="invalid_json")
    # Of a union, each branch has errors. The branch that reads furthest into the field is the one that was meant.
    paths, branches = [_path(error, body) for error in errors], dict[object, int]()
    for n, (error, path) in enumerate(zip(errors, paths, strict=True)):
        if path[: len(paths[0])] == paths[0]:
            branches.setdefault(tuple(part for part in error["loc"] if part not in path), n)
    at = max(branches.values(), key=lambda n: (len(paths[n]), [part for part in paths[n] if isinstance(part, int)]))
    first, param = errors[at], ".".join(map(str, paths[at])) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param}: not a field that this server knows", param=param, code="unknown_parameter")
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] in ("missing", "model_attributes_type") and param is None:
        return ApiError(400, "the body is no JSON object", code="invalid_json")
    if param is None:  # of the whole body: its message begins with the field
        field = message.partition(":")[0]
        return ApiError(400, message, param=field if field in (body or ()) else None, code="invalid_value")
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def _path(error: Mapping[str, Any], body: Any) -> list[int | str]:
    # keys and indices of the field at fault, without pydantic's names of branches
    path, value = list[int | str](), body
    parts = [part for part in error["loc"] if part != "body"]
    for n, part in enumerate(parts):
        inside = isinstance(value, dict) and (part in value or (n == len(parts) - 1 and error["type"] == "missing"))
        if body is None or inside or (isinstance(value, list) and isinstance(part, int)):
            path.append(part)
            value = value.get(part) if isinstance(value, dict) else value[part] if isinstance(value, list) else None
    return path


def _replay(body: bytes, receive: Receive) -> Receive:  # gives the body once, then the later messages of the client
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed
