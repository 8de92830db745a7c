"""An HTTP server on a real socket that answers what a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx


@contextmanager
def site(
    answer: Callable[[str, Any, str | None], tuple[int, Any]], headers: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The address of a server until the block ends.

    Args:
        answer: (path, JSON body or None, Authorization) -> (status, text, bytes or JSON).
        headers: more headers of every answer.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers["Content-Length"] or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, reply = answer(self.path, body, self.headers["Authorization"])
            text = reply if isinstance(reply, str | bytes) else json.dumps(reply)
            data = text.encode() if isinstance(text, str) else text
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            if data.startswith(b"data: "):
                self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class FakeServer:
    """A server whose responses a subclass makes."""

    def reply(self, path: str, body: Any, key: str | None) -> tuple[int, Any]:
        """The response to a request, as in `site`."""
        raise NotImplementedError

    @contextmanager
    def listening(self) -> Iterator[str]:
        """Its address."""
        with site(self.reply) as url:
            yield url


@contextmanager
def usage_only(url: str) -> Iterator[str]:
    """The address of a gateway before a server: it shows no metrics, and hands answers on whole."""

    def answer(path: str, body: Any, _key: str | None) -> tuple[int, Any]:
        if body is None and path != "/v1/models":
            return 404, "no such page"
        found = httpx.request("GET" if body is None else "POST", url + path, json=body, timeout=60)
        return found.status_code, found.content

    with site(answer) as gateway:
        yield gateway
