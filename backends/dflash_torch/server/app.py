"""The ASGI application: what admits a request, how errors are answered, and the worker's start and end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_serve.errors import UserError

from .handler import RequestHandler
from .responses import ApiError, ErrorBody
from .routes import add_generation_routes, add_status_routes
from .settings import ApiKeys, ServerSettings

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What a probe without a key may ask."""
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 405, 408, 413, 429, 431, "4XX", 500, 503)
}
"""What any route may answer, for the OpenAPI document; 4XX keeps FastAPI from adding a 422 of its own."""


class AdmissionMiddleware:
    """Refuses a request before a route sees it: for the size of its headers, its key, the size or pace of its body.

    Pure ASGI, so that a route's `receive` still sees the client go.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, keys: ApiKeys) -> None:
        self.app, self.settings, self.keys = app, settings, keys
        self.open_paths = OPEN_PATHS | {"/metrics"} if settings.open_metrics else OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            self._check_head(scope)
            body = await self._body(scope, receive)
        except ApiError as error:
            return await error.response()(scope, receive, send)
        if body is not None:  # None = the client is gone
            await self.app(scope, _replay(body, receive), send)

    def _check_head(self, scope: Scope) -> None:
        headers = scope["headers"]
        if sum(len(name) + len(value) for name, value in headers) > self.settings.max_header_bytes:
            raise ApiError(431, f"the headers are larger than {self.settings.max_header_bytes} bytes")
        authorization = next((value.decode("latin-1") for name, value in headers if name == b"authorization"), "")
        owner = self.keys.owner(authorization)
        if owner is None and scope["path"] not in self.open_paths:
            raise ApiError(401, "send a valid key as `Authorization: Bearer <key>`", code="invalid_api_key")
        scope.setdefault("state", {})["owner"] = owner or ""

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        most = self.settings.max_body_bytes
        too_large = ApiError(413, f"the body is larger than {most} bytes", code="body_too_large")
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if declared.isdigit() and int(declared[:20]) > most:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.settings.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {self.settings.body_seconds:g} seconds") from None


def create_app(handler: RequestHandler) -> FastAPI:
    """The application without its middleware, for the OpenAPI document."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        handler.worker.launch(asyncio.get_running_loop())
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
    for kind in (ApiError, UserError, RequestValidationError, ValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _error_response)
    add_generation_routes(app, handler)
    add_status_routes(app, handler)
    return app


def admitting_app(handler: RequestHandler) -> ASGIApp:
    """The application as it is served."""
    return AdmissionMiddleware(create_app(handler), handler.settings, handler.keys)


async def _error_response(_: Request, error: Exception) -> JSONResponse:
    """Every error in OpenAI's shape."""
    if isinstance(error, ApiError):
        return error.response()
    if isinstance(error, UserError):
        return ApiError.of(error).response()
    if isinstance(error, RequestValidationError | ValidationError):
        return _invalid_body(error.errors()[0]).response()
    if isinstance(error, HTTPException):
        response = ApiError(error.status_code, str(error.detail)).response()
        response.headers.update(error.headers or {})
        return response
    return ApiError(500, "an internal error; the server's log says more").response()


def _invalid_body(first: Mapping[str, Any]) -> ApiError:
    """The first thing that pydantic found wrong with a body."""
    where = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(where) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param}: not a field that this server knows", param=param, code="unknown_parameter")
    message = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code="invalid_value")


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once, then whatever comes: which is the client going."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed
