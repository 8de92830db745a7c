"""trtllm-serve as a probe meets it: counters that move after an answer has ended, an unbounded queue, a deep /health.

/health answers at once. /health_generate and /v1/completions wait for their turn in the queue. The Prometheus page is
filled from a buffer, `late` seconds after an answer's end, and /metrics is JSON that is emptied by reading it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeTrtllmServe:
    """One engine: `drafted` and `accepted` tokens an answer, each `seconds` long, one at a time."""

    def __init__(self, drafted: int = 40, accepted: int = 12, seconds: float = 0.05, late: float = 1.0) -> None:
        self.drafted, self.accepted, self.seconds, self.late = drafted, accepted, seconds, late
        self.asked = list[str]()
        self._turn = threading.Lock()
        self._ended = list[float]()

    def answer(self) -> None:
        """Waits for its turn, however long, and takes it."""
        with self._turn:
            time.sleep(self.seconds)
            self._ended.append(time.monotonic())

    def page(self) -> str:
        """/prometheus/metrics of now: without a line of speculation before the first was counted."""
        counted = sum(end + self.late < time.monotonic() for end in self._ended)
        lines = [f'trtllm_request_success_total{{model_name="m",engine_type="x"}} {counted}.0']
        for name, each in (("drafted", self.drafted), ("accepted", self.accepted)):
            series = f'trtllm_spec_decode_{name}_tokens_total{{model_name="m",engine_type="x",token_position="0"}}'
            lines += [f"{series} {float(each * counted)}"] if counted and self.drafted else []
        return "# HELP trtllm_request_success_total Requests.\n" + "\n".join(lines) + "\n"

    @contextmanager
    def listening(self) -> Iterator[str]:
        """Its address."""
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                engine.asked.append(self.path)
                if self.path in ("/health_generate", "/v1/completions"):
                    engine.answer()
                body = (
                    engine.page()
                    if self.path == "/prometheus/metrics"
                    else json.dumps([] if "met" in self.path else {})
                )
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body.encode())

            do_POST = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None: ...

        listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        listener.daemon_threads = True
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.server_port}"
        finally:
            listener.shutdown()
            listener.server_close()
