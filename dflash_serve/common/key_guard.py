"""ASGI middleware that closes every route of a server to requests without an API key. Needs no web framework."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
REFUSAL = json.dumps(
    {
        "error": {
            "message": "send a valid key as `Authorization: Bearer <key>`",
            "type": "authentication_error",
            "param": None,
            "code": "invalid_api_key",
        }
    }
).encode()
"""An error in OpenAI's shape."""


class KeyGuard:
    """Answers HTTP 401 to requests and web sockets without a valid key, before any route sees them.

    The owner of the key, `key <number>`, is in the scope's state under `owner`; it is empty without a key.

    Args:
        keys: API keys; none = the server is open to all.
        open_paths: paths that need no key: those of probes and metrics.
        preflights: OPTIONS needs no key: browsers ask by it, without a key, what a server's CORS rules allow.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], open_paths: Iterable[str], *, preflights: bool = False
    ) -> None:
        self.app, self.open_paths, self.preflights = app, frozenset(open_paths), preflights
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands the request on, or refuses it."""
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        owner = self._owner(next((value for name, value in scope["headers"] if name == b"authorization"), b""))
        if owner is None and not self._is_open(scope):
            return await _refuse(scope, receive, send)
        scope.setdefault("state", {})["owner"] = owner or ""
        return await self.app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
        is_preflight = self.preflights and scope.get("method") == "OPTIONS"
        return scope["type"] == "http" and (path in self.open_paths or is_preflight)

    def _owner(self, authorization: bytes) -> str | None:  # None = no valid key; all are compared, in constant time
        if not self._digests:
            return ""
        scheme, _, key = authorization.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return f"key {found.index(True)}" if scheme.lower() == b"bearer" and any(found) else None


async def drain(scope: Scope, receive: Receive) -> None:
    """Reads the rest of a refused body: a client that sends all of it before it reads would only see a reset."""
    if any(name == b"expect" for name, _ in scope["headers"]):
        return  # it waits for the answer before it sends a body
    while (await receive()).get("more_body"):
        pass


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":  # closed before it is accepted: the client gets HTTP 403
        return await send({"type": "websocket.close", "code": 1008})
    await drain(scope, receive)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(REFUSAL)).encode())]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    return await send({"type": "http.response.body", "body": REFUSAL})
