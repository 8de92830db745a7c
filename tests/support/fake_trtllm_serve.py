"""trtllm-serve as a probe meets it: counters that move after an answer has ended, an unbounded queue, a deep /health.

/health answers at once. /health_generate and /v1/completions wait for their turn in the queue. The Prometheus page is
filled from a buffer, `late` seconds after an answer's end, and /metrics is JSON that is emptied by reading it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .site import site

DRAFTED, ACCEPTED = 40, 12  # tokens an answer


class FakeTrtllmServe:
    """One engine: an answer takes `seconds`, one at a time, and its page counts it `late` seconds after its end."""

    def __init__(self, late: float) -> None:
        self.seconds, self.late, self.asked = 0.05, late, list[str]()
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
        for name, each in (("drafted", DRAFTED), ("accepted", ACCEPTED)):
            series = f'trtllm_spec_decode_{name}_tokens_total{{model_name="m",engine_type="x",token_position="0"}}'
            lines += [f"{series} {float(each * counted)}"] if counted else []
        return "# HELP trtllm_request_success_total Requests.\n" + "\n".join(lines) + "\n"

    @contextmanager
    def listening(self) -> Iterator[str]:
        """Its address."""

        def reply(path: str, *_: object) -> tuple[int, object]:
            self.asked.append(path)
            if path in ("/health_generate", "/v1/completions"):
                self.answer()
            return 200, self.page() if path == "/prometheus/metrics" else [] if "met" in path else {}

        with site(reply) as url:
            yield url
