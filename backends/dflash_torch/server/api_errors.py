"""Errors in OpenAI's shape, and JSON in ASCII."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse

from dflash_serve.errors import UserError

ERROR_TYPES = {
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


class AsciiJSON(JSONResponse):
    """JSON that survives whatever a request made us repeat, lone surrogates included."""

    def render(self, content: Any) -> bytes:
        return ascii_json(content).encode("ascii")


class ApiError(Exception):
    """An answer that is an error.

    Args:
        param: the field of the request that is at fault.
        code: for programs, such as `context_length_exceeded`.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = ERROR_TYPES.get(status, "invalid_request_error")
        self.body = ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code))

    @classmethod
    def of(cls, error: UserError) -> ApiError:
        """A mistake in the request."""
        return cls(400, str(error), param=error.where or None, code="invalid_value")

    def response(self) -> JSONResponse:
        """The error as an HTTP response."""
        retry = RETRY_SECONDS.get(self.status)
        return AsciiJSON(self.body.model_dump(), self.status, headers={"Retry-After": retry} if retry else None)


def ascii_json(content: Any) -> str:
    """JSON in ASCII: some clients take U+2028 and its like for the end of a line of an event stream."""
    return json.dumps(content, allow_nan=False, separators=(",", ":"))
