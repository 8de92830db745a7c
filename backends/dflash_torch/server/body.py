"""The JSON of a body, read beside the event loop and counted before it is validated."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from .api import ApiError

MAX_OBJECTS = 16_384
"""JSON objects of one body. Each costs the event loop up to 25 us when it is validated: 0.4 s for so many."""


def read_json(body: bytes, max_messages: int) -> Any:
    """The value of a body.

    Raises:
        ValueError: it is no JSON, or an object in it has one key twice.
        ApiError: it has more messages or objects than are taken, or half a surrogate pair.
    """
    objects = 0

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal objects
        objects += 1
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"the key {next(name for name in found if names.count(name) > 1)!r} is there twice")
        return found

    value = json.loads(body, object_pairs_hook=once)
    if rb"\ud" in body.lower():  # an escape of half a surrogate pair
        _refuse_halves(value)
    messages = value.get("messages") if isinstance(value, dict) else None
    if isinstance(messages, list) and len(messages) > max_messages:
        raise ApiError(400, f"{len(messages):,} messages, at most {max_messages:,} are taken", param="messages")
    if objects > MAX_OBJECTS:
        raise ApiError(400, f"{objects:,} JSON objects, at most {MAX_OBJECTS:,} are taken", code="invalid_value")
    return value


def _refuse_halves(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half, fields = error.object[error.start], value if isinstance(value, dict) else {}
        texts = {name: json.dumps([name, value], ensure_ascii=False) for name, value in fields.items()}
        name = next((name for name, text in texts.items() if half in text), None)
        where = f"{name}: " if name else ""
        what = f"{where}{half!r} is half a surrogate pair, and no character"
        raise ApiError(400, what, param=name, code="invalid_value") from None


class JSONRoute(APIRoute):
    """A route whose JSON is read by `read_json`, in a thread: 4 MB take a tenth of a second."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, given a request that reads JSON as above."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(_JSONRequest(request.scope, request.receive))

        return handler


class _JSONRequest(Request):
    async def json(self) -> Any:
        settings = self.app.state.settings
        return await run_in_threadpool(read_json, await self.body(), settings.max_messages)
