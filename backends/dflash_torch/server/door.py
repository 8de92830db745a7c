"""What every request passes before a route sees it: size of the headers, the key, size and pace of the body."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .keys import ApiKeys
from .settings import ServerSettings

OPEN = frozenset({"/health", "/ready"})
"""What a probe without a key may ask."""


class Door:
    """Pure ASGI, so that a route's `receive` still sees the client go."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, keys: ApiKeys) -> None:
        self.app, self.settings, self.keys = app, settings, keys
        self.open = OPEN | {"/metrics"} if settings.open_metrics else OPEN

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            self._admit(scope)
            body = await self._body(scope, receive)
        except ApiError as error:
            return await error.response()(scope, receive, send)
        if body is not None:  # None = the client is gone
            await self.app(scope, _replay(body, receive), send)

    def _admit(self, scope: Scope) -> None:
        headers = scope["headers"]
        if sum(len(name) + len(value) for name, value in headers) > self.settings.max_header_bytes:
            raise ApiError(431, f"the headers are larger than {self.settings.max_header_bytes} bytes")
        authorization = next((value.decode("latin-1") for name, value in headers if name == b"authorization"), "")
        owner = self.keys.owner(authorization)
        if owner is None and scope["path"] not in self.open:
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


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once, then whatever comes: which is the client going."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed
