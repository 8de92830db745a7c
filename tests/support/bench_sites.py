"""A server that lists a model and counts, an aiperf that answers at once, and settings: what a bench is tested with."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from inspect import signature
from typing import Any

from dflash_serve.bench.aiperf import Figures, Job
from dflash_serve.bench.settings import Settings
from dflash_serve.cli.bench import bench

METRICS = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total {steps}
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total {drafted}
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total {accepted}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} {second}
"""


SMALL = {"backend": "torch", "dataset": "p.jsonl", "concurrency": (1, 2), "max_tokens": 64}


def settings(**changes: Any) -> Settings:
    """The command line's defaults for a small bench, with changes."""
    defaults = {
        name: each.default for name, each in signature(bench).parameters.items() if name in Settings.model_fields
    }
    return Settings.model_validate({**defaults, **SMALL, **changes})


@contextmanager
def counting_server() -> Iterator[str]:
    """vLLM's counters, which have grown by 100 steps each time that they are read."""
    reads = 0

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal reads
            text = json.dumps({"data": [{"id": "m"}]})
            if self.path == "/metrics":
                reads += 1
                counts = {"steps": 100, "drafted": 200, "accepted": 90, "first": 60, "second": 30}
                text = METRICS.format(**{name: reads * count for name, count in counts.items()})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def instant(rate: Callable[[Job], float], jobs: list[Job]) -> Callable[[Any, Job], Figures]:
    """In place of `Aiperf.run`: `rate` tokens/s for one user; notes the jobs that it measured."""

    def run(_: Any, job: Job) -> Figures:
        speed = rate(job)
        if not job.folder.name.endswith("warm-up"):
            jobs.append(job)
        return Figures(
            requests=job.requests,
            errors=0,
            output_tokens=64.0 * job.requests,
            seconds=1.0,
            throughput=speed * job.concurrency,
            interactivity=speed,
            first_token_ms=12.0,
            first_token_p99_ms=30.0,
            inter_token_ms=1e3 / speed,
        )

    return run
