"""The frontend of Dynamo 1.6.1 before an SGLang worker, as its clients meet it.

It refuses unknown fields (`return_token_ids` among them: lib/llm/src/protocols/openai/validate.rs) and ignores
`detokenize`. Its /metrics has no engine's names: those are under the worker's system port, without our plug-in's. The
stream of a worker that dies has an error event, whose message is a comment (lib/llm/src/http/service/disconnect.rs).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .fake_sglang import FakeSglang
from .site import site

UNKNOWN = ("return_token_ids",)
FRONTEND = 'dynamo_frontend_requests_total{endpoint="chat_completions",model="toy"} 1\n'
ERROR = "event: error\n: Stream ended before generation completed\n\n"


class FakeDynamo:
    """One frontend with one worker."""

    def __init__(self, worker: FakeSglang) -> None:
        self.worker = worker
        self.failures = 0  # Streams that will end with an error event

    @contextmanager
    def listening(self) -> Iterator[tuple[str, str]]:
        """The addresses of the frontend and of its worker's system port."""
        with site(self._frontend) as frontend, site(self._system) as system:
            yield frontend, system

    def _frontend(self, path: str, body: Any, key: str | None) -> tuple[int, Any]:
        if body is None:
            return {
                "/metrics": (200, FRONTEND),
                "/v1/models": (200, {"data": [{"id": "toy", "object": "object", "owned_by": "nvidia"}]}),
            }.get(path, (404, ""))
        if unknown := [name for name in body if name in UNKNOWN]:
            return 400, {"message": f"Unsupported parameter(s): `{unknown[0]}`", "type": "Bad Request", "code": 400}
        status, answer = self.worker.reply(path, body, key)
        if body.get("stream") and self.failures > 0:
            self.failures -= 1
            return status, answer.split("\n\n")[0] + "\n\n" + ERROR + "data: [DONE]\n\n"
        return status, answer

    def _system(self, path: str, *_: Any) -> tuple[int, Any]:
        return (200, self.worker.page("sglang:")) if path == "/metrics" else (404, "")
