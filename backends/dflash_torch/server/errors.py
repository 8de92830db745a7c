"""Errors in OpenAI's shape, the same for every route and every fault."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from dflash_serve.errors import UserError

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
RETRY_SECONDS = {429: "1", 503: "5"}


class ErrorDetail(BaseModel):
    """What is wrong, in words, and for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """An OpenAI error."""

    error: ErrorDetail


FAULTS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 405, 408, 413, 429, 431, "4XX", 500, 503)
}
"""What any route may answer, for the OpenAPI document; 4XX keeps FastAPI from adding a 422 of its own."""


class ApiError(Exception):
    """An answer that is an error.

    Args:
        param: the field of the request that is at fault.
        code: for programs, such as `context_length_exceeded`.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = TYPES.get(status, "invalid_request_error")
        self.body = ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))

    @classmethod
    def of(cls, error: UserError) -> ApiError:
        """A mistake in the request."""
        return cls(400, str(error), param=error.where or None, code="invalid_value")

    def response(self) -> JSONResponse:
        """As HTTP."""
        retry = RETRY_SECONDS.get(self.status)
        return AsciiJSON(self.body.model_dump(), self.status, headers={"Retry-After": retry} if retry else None)


class AsciiJSON(JSONResponse):
    """JSON that survives whatever a request made us repeat, lone surrogates included."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def of_validation(errors: list[Any]) -> ApiError:
    """The first thing pydantic found wrong with a body."""
    first: Mapping[str, Any] = errors[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(where) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param}: not a field that this server knows", param=param, code="unknown_parameter")
    message = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code="invalid_value")


def install(app: FastAPI) -> None:
    """Makes every error of the app one of ours."""

    async def api_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response()

    async def user_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, UserError)
        return ApiError.of(error).response()

    async def validation(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError | ValidationError)
        return of_validation(list(error.errors())).response()

    async def http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        response = ApiError(error.status_code, str(error.detail)).response()
        response.headers.update(error.headers or {})
        return response

    async def anything(_: Request, error: Exception) -> JSONResponse:
        return ApiError(500, "an internal error; the server's log says more").response()

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(UserError, user_error)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(ValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, anything)
