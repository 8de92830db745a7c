"""Every route of a web application, asked with and without an API key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect


def routes_of(routes: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """(method, path) of every route, with parameters filled in; the method of a web socket is `WEBSOCKET`."""
    for route in routes:
        path = (getattr(route, "path", None) or "").replace("{model:path}", "m").replace("{", "").replace("}", "")
        inner = getattr(route, "original_router", route)  # of FastAPI's included routers, which have no path
        yield from routes_of(getattr(inner, "routes", None) or ())
        if getattr(route, "methods", None):
            yield from ((method, path) for method in sorted(route.methods))
        elif "WebSocket" in type(route).__name__:
            yield "WEBSOCKET", path
        elif path:  # of an application within, which takes any
            yield "GET", path


def open_to(app: Any, key: str | None) -> set[tuple[str, str]]:
    """Those routes that answer with something else than 401, or accept a web socket."""
    client = TestClient(app, raise_server_exceptions=False)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    found = set()
    for method, path in routes_of(app.routes):
        if method == "WEBSOCKET":
            try:
                with client.websocket_connect(path, headers=headers):
                    found.add((method, path))
            except WebSocketDisconnect:
                pass
            except Exception:  # the route itself, which has no engine here
                found.add((method, path))
        elif client.request(method, path, headers=headers).status_code != 401:
            found.add((method, path))
    return found
