"""A server that lists a model and counts, an aiperf that answers at once, and settings: what a bench is tested with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from itertools import count
from typing import Any

from dflash_serve.bench.aiperf import Figures, Job
from dflash_serve.bench.settings import BenchSettings
from dflash_serve.cli.bench import bench
from tests.support.site import site

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


def settings(**changes: Any) -> BenchSettings:
    """The command line's defaults for a small bench, with changes."""
    defaults = {
        name: each.default for name, each in signature(bench).parameters.items() if name in BenchSettings.model_fields
    }
    return BenchSettings.model_validate({**defaults, **SMALL, **changes})


@contextmanager
def counting_server() -> Iterator[str]:
    """vLLM's counters, which have grown by 100 steps each time that they are read."""
    counts, reads = {"steps": 100, "drafted": 200, "accepted": 90, "first": 60, "second": 30}, count(1)

    def answer(path: str, *_: object) -> tuple[int, object]:
        if path != "/metrics":
            return 200, {"data": [{"id": "m"}]}
        times = next(reads)
        return 200, METRICS.format(**{name: times * each for name, each in counts.items()})

    with site(answer) as url:
        yield url


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
