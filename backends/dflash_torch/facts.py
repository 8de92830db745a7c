"""Names of the embedded server's probes and metrics (`server.worker` writes them), and their readers.

Counters of slots and widths are those of every engine: `dflash_serve.adapter.counters`.
"""

from __future__ import annotations

from collections.abc import Iterator

from dflash_serve.adapter.counters import LINES, read_slot_counters, where_absent
from dflash_serve.adapter.facts import EngineFacts, MetricNames, Probes, Refusal
from dflash_serve.adapter.refusals import deployment_keys
from dflash_serve.checkpoint.config import Heads
from dflash_serve.common.prometheus import Scrape, gauge, rate
from dflash_serve.errors import Problem
from dflash_serve.speculation.statistics import AcceptanceStatistics

PREFIX = "dflash:"
ACCEPTANCE_LENGTH = f"{PREFIX}spec_decode_acceptance_length"
# Names of release 0.2, which are written beside today's until 0.4; counters without `_total`.
DRAFTS, DRAFTED, ACCEPTED, ACCEPTED_BY_SLOT = (
    f"{PREFIX}spec_decode_num_{name}"
    for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
)
WIDTHS, SURVIVAL = f"{PREFIX}spec_decode_width", f"{PREFIX}spec_decode_survival"
EARLIER = {
    "acceptance_length": (
        "{{pod}}",
        f"1 + {rate(f'{ACCEPTED}_total', by='pod')} / {rate(f'{DRAFTS}_total', by='pod')}",
    ),
    "survival": ("slot {{slot}}", gauge(SURVIVAL, by="slot", fold="avg")),
    "widths": ("width {{width}}", rate(f"{WIDTHS}_total", by="width")),
}
QUEUED, RUNNING = f"{PREFIX}num_requests_waiting", f"{PREFIX}num_requests_running"
CACHE_USAGE = f"{PREFIX}kv_cache_usage_perc"
PROMPT_TOKENS, CACHED_TOKENS = f"{PREFIX}prompt_tokens", f"{PREFIX}prompt_tokens_cached"
REVISION = "drafter_revision"
"""Label of the counters of slots: number of drafters that were served before (`swapping`)."""
REQUESTS_ENDED, REQUESTS_REFUSED = f"{PREFIX}request_success", f"{PREFIX}request_refused"

SETTINGS_PREFIX = "DFLASH_SERVE_HTTP_"  # environment variables of `server.settings`
MODULES = (
    *("torch", "transformers", "safetensors"),
    *("fastapi", "uvicorn", "sse_starlette", "prometheus_client", "llguidance"),
)
"""Modules that the engine and its server import, which the extra `serve` brings."""
SERVER_FLAGS = ("served-model-name", "api-key-file", "drain-seconds", "acceptance-metrics")

HONOURED = {
    *("target.model", "target.revision", "drafter.model", "drafter.revision", "drafter.quantization"),
    *("speculation.block_size", "speculation.width", "hardware.gpu", "hardware.dtype"),
    *("limits.max_batch_size", "limits.max_model_len", "limits.max_queued_requests"),
    *("serving.served_model_name", "serving.api_key_file", "serving.log_format"),
}
INSTEAD = {
    "parallel.data": "set it to 1, and take replicas: `dflash-serve deploy`",
    "speculation.draft_window": "leave it out, or serve with --backend sglang",
    "role": "leave it out, or serve with --backend sglang",
    "pair": "leave it out, or serve with --backend sglang or vllm",
    "parallel.context": "leave it out, or serve with --backend tensorrt-llm",
}
"""Advice on a key that is not honoured; for all others it is to leave it out, or to take another backend."""
REFUSALS = tuple(
    Refusal(
        key,
        "the embedded backend has no such thing (given: {value!r})",
        INSTEAD.get(key, "leave it out, or serve with another --backend"),
    )
    for key in ("pair", *deployment_keys())  # before the role that a half of a pair has, too
    if key not in HONOURED and not key.startswith("pair.")
)


def read_acceptance(scrape: Scrape) -> AcceptanceStatistics | None:
    """Acceptance by the embedded server's counters of slots; None = not its metrics."""
    return read_slot_counters(scrape.samples(), FACTS.title, PREFIX)


FACTS = EngineFacts(
    title="dflash-serve",
    engine_type="dflash",
    probes=Probes(started="/ready", live="/live", ready="/ready"),
    metrics=MetricNames(
        path="/metrics",
        queued=QUEUED,
        running=RUNNING,
        kv_cache_usage=CACHE_USAGE,
        acceptance_length=ACCEPTANCE_LENGTH,
        generated=f"{PREFIX}generation_tokens_total",
        time_to_first_token=f"{PREFIX}time_to_first_token_seconds",
        inter_token_latency=f"{PREFIX}inter_token_latency_seconds",
        queue_time=f"{PREFIX}request_queue_time_seconds",
        request_latency=f"{PREFIX}e2e_request_latency_seconds",
    ),
    speculation=LINES,
    earlier=where_absent(EARLIER),
    errors=("{{pod}}", rate(f"{REQUESTS_ENDED}_total", by="pod", extra=', finished_reason="error"')),
    refused=("{{status}}", rate(f"{REQUESTS_REFUSED}_total", by="status")),
    read_acceptance=read_acceptance,
    needs_gpu=False,
    server_flags=SERVER_FLAGS,
    refusals=REFUSALS,
)


def head_problems(heads: Heads) -> Iterator[Problem]:
    """Heads that the embedded engine does not run."""
    if heads.not_embedded is not None:
        other = "vllm" if heads.latent else "sglang or vllm"
        yield Problem(heads.not_embedded, "drafter.model", f"use --backend {other}")
