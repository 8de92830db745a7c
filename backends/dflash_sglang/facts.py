"""Facts about SGLang: the release that was read and run, probes, metric names and readers."""

from __future__ import annotations

from dflash_serve.adapter.counters import LINES, PREFIX, counted_once, read_slot_counters
from dflash_serve.adapter.facts import EngineFacts, MetricNames, Probes, Refusal, Releases
from dflash_serve.common.prometheus import Samples, Scrape, rate
from dflash_serve.speculation.statistics import AcceptanceStatistics

RELEASES = Releases("sglang", "SGLang", (0, 5, 23), (0, 5, 23), "sglang.srt.server_args")
"""The release whose source was read and whose server was run."""

DRAFT_SECONDS = f"{PREFIX}draft_seconds"  # histogram of the drafter's passes, of our plug-in
RESPONSES = "sglang:http_responses_total"
FULL, FAILED = ', status_code=~"429|503"', ', status_code=~"[45]..", status_code!~"429|503"'
"""Selects answers of a server that is full or not ready (SGLang says 503 where its queue is full), and other errors."""

REFUSALS = (
    Refusal("hardware.gpu", "SGLang's DFlash runs on GPUs (CUDA) only", "use the torch backend on a CPU", ("none",)),
    Refusal(
        "parallel.pipeline",
        "SGLang's DFlash does not run with pipeline parallelism",
        "set it to 1 and raise parallel.tensor",
        drafting=True,
    ),
    Refusal(
        "parallel.context",
        "context parallelism is not covered by this backend",
        "set it to 1, or use the tensorrt-llm backend",
    ),
    Refusal(
        "hardware.dtype",
        "SGLang runs DFlash drafts in bfloat16 only",
        "use auto or bfloat16",
        ("float32",),
        drafting=True,
    ),
    Refusal("hardware.dtype", "SGLang serves in bfloat16", "use auto or bfloat16", ("float32",)),
)


def read_acceptance(scrape: Scrape) -> AcceptanceStatistics | None:
    """Acceptance by our plug-in's counters where it is loaded, else by SGLang's own; None = not SGLang's metrics."""
    samples = scrape.samples()
    return read_slot_counters(samples, f"{FACTS.title} with dflash-serve", "sglang:") or _of_sglang(samples)


def _of_sglang(samples: Samples) -> AcceptanceStatistics | None:
    """SGLang's counters move when a request ends, so its answers' last blocks count only as far as they were used."""
    gauge, block = samples.mean("sglang:spec_accept_length"), samples.mean("sglang:spec_num_draft_tokens")
    steps = samples.total("sglang:spec_verify_calls_total")
    generated, requests = samples.total("sglang:generation_tokens_total"), samples.total("sglang:num_requests_total")
    if steps is None and gauge is None and generated and requests:  # a request that ended would have moved the counter
        return AcceptanceStatistics(0, 0, 0, None, None, None, FACTS.title)
    if steps is None or generated is None or requests is None:
        known = gauge is not None or samples.knows("sglang:")
        return AcceptanceStatistics.unknown(FACTS.title, gauge) if known else None
    # A request's first token comes from its prefill, every other one from a verification; SGLang counts the anchor.
    accepted = max(0.0, generated - requests - steps)
    drafted = steps * (block - 1) if block else None
    return AcceptanceStatistics(steps, drafted, accepted, None, None, None, FACTS.title)


def read_reloaded(samples: Samples) -> float | None:
    """Cached prompt tokens by their source (observability/metrics_collector.py); the counter is absent until one is."""
    if not samples.knows("sglang:"):
        return None
    sources = samples.named("sglang:cached_tokens_total")
    return sum(value for labels, value in sources if labels.get("cache_source") in ("host", "storage"))


FACTS = EngineFacts(
    title="SGLang",
    engine_type="sglang",
    probes=Probes(started="/health", live="/health", ready="/health_generate"),
    metrics=MetricNames(
        path="/metrics",
        queued="sglang:num_queue_reqs",
        running="sglang:num_running_reqs",
        kv_cache_usage="sglang:token_usage",
        acceptance_length="sglang:spec_accept_length",
        generated="sglang:generation_tokens_total",
        time_to_first_token="sglang:time_to_first_token_seconds",
        inter_token_latency="sglang:inter_token_latency_seconds",
        queue_time="sglang:queue_time_seconds",
        request_latency="sglang:e2e_request_latency_seconds",
    ),
    speculation=LINES,
    errors=("{{status_code}}", rate(RESPONSES, by="status_code", extra=FAILED)),
    refused=("{{status_code}}", rate(RESPONSES, by="status_code", extra=FULL)),
    refusals=REFUSALS,
    drafting_arguments=("speculative_algorithm",),
    read_acceptance=read_acceptance,
    kv_pool=lambda samples: counted_once(samples, "sglang:max_total_num_tokens"),
    kv_reloaded=read_reloaded,
    server_flags=("api-key-file",),
    data_parallel=True,
    # Of 0.5.23: the scheduler's `update_weights_from_disk` selects "all" runners, the target's first.
    no_swap="SGLang's /update_weights_from_disk has no choice of model, and loads a drafter's folder into the target",
    # Otherwise /health generates a token too, and a full batch would look like a dead process.
    environment={"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"},
    # The default of --disaggregation-bootstrap-port: where a prefill server tells decoding ones of its K/V.
    prefill_annotations={"sglang.ai/bootstrap-port": "8998"},
)
