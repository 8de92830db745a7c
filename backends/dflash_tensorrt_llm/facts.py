"""Facts about trtllm-serve: probes, metric names and readers (tensorrt_llm/metrics/collector.py @050f80d)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dflash_serve.adapter.facts import EngineFacts, MetricNames, Probes, Refusal, SpeculationLines
from dflash_serve.common.prometheus import Scrape, gauge, rate
from dflash_serve.speculation.statistics import AcceptanceStatistics

ITERATIONS, PROMETHEUS = "/metrics", "/prometheus/metrics"
"""JSON that is emptied by reading it, and Prometheus text, which needs `return_perf_metrics`."""
DRAFTED, ACCEPTED = "trtllm_spec_decode_drafted_tokens_total", "trtllm_spec_decode_accepted_tokens_total"
ACCEPTANCE_LENGTH = "trtllm_spec_decode_acceptance_length"

REFUSALS = (
    Refusal(
        "hardware.gpu",
        "TensorRT-LLM runs on NVIDIA GPUs only",
        "name the GPU, or serve with --backend torch",
        ("none",),
    ),
    Refusal("parallel.pipeline", "DFlash does not run with pipeline parallelism", "set it to 1", drafting=True),
    Refusal("parallel.context", "DFlash does not run with context parallelism (Helix)", "set it to 1", drafting=True),
    Refusal(
        "parallel.data",
        "one trtllm-serve has one copy of the model, not {value}",
        "`dflash-serve deploy` makes {value} replicas of it; to start one yourself, set it to 1",
    ),
    Refusal("hardware.dtype", "TensorRT-LLM does not serve in float32", "set it to auto or bfloat16", ("float32",)),
    Refusal(
        "limits.max_queued_requests",
        "TensorRT-LLM queues without bound, it cannot stop at {value} requests",
        "leave it out, and bound the queue at your gateway",
        given=True,
    ),
    Refusal(
        "serving.api_key_file",
        "trtllm-serve does not check API keys",
        "leave it out, and check keys in a gateway",
    ),
    Refusal(
        "serving.log_format",
        "trtllm-serve logs text alone",
        "leave it out, and let the collector of your logs parse text",
    ),
    Refusal(
        "role",
        "role {value}: the decoding server never sees the prompt's features, so acceptance silently drops"
        " (TensorRT-LLM#19352)",
        "serve whole, or use --backend sglang",
        drafting=True,
    ),
    Refusal("role", "role {value} is not covered by this backend", "serve whole, or use --backend sglang"),
    Refusal(
        "pair",
        "a decoding server of TensorRT-LLM never sees the prompt's features, so acceptance silently drops"
        " (TensorRT-LLM#19352)",
        "leave it out, or use --backend sglang",
        drafting=True,
    ),
    Refusal("pair", "pairs are not covered by this backend", "leave it out, or use --backend sglang"),
    Refusal(
        "speculation.draft_window",
        "TensorRT-LLM has no setting for a drafter's window: it takes the one that the drafter was trained with",
        "leave it out, or use --backend sglang",
    ),
)


def read_acceptance(scrape: Scrape) -> AcceptanceStatistics | None:
    """Acceptance from Prometheus text where that counts by slot, otherwise from the iterations, which know more."""
    iterations = _iterations(scrape.text(ITERATIONS))
    by_slot = _of_prometheus(scrape) if iterations is not None or scrape.samples(ITERATIONS).knows("trtllm_") else None
    if iterations is None or (by_slot is not None and by_slot.verifications is not None):
        return by_slot
    return _of_iterations(iterations) or by_slot or AcceptanceStatistics.unknown(FACTS.title)


def _iterations(text: str) -> list[Any] | None:  # None where the text is something else
    if not text.lstrip().startswith("["):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, list) else None


def _of_iterations(iterations: Sequence[Any]) -> AcceptanceStatistics | None:
    """Sums over iterations; the page keeps 1,000 of them, and reading it empties it. None: no speculation in them."""
    stats = [one["specDecodingStats"] for one in iterations if isinstance(one, dict) and "specDecodingStats" in one]
    if not stats:
        return None
    keys = ("numRequestsWithDraftTokens", "numDraftTokens", "numAcceptedTokens")
    verifications, drafted, accepted = (float(sum(each.get(key) or 0 for each in stats)) for key in keys)
    return AcceptanceStatistics(verifications, drafted, accepted, None, None, None, FACTS.title, drained=True)


def _of_prometheus(scrape: Scrape) -> AcceptanceStatistics | None:
    samples = scrape.samples(ITERATIONS)
    if not samples.knows("trtllm_"):
        samples = scrape.samples(PROMETHEUS)
    offered = samples.by_slot(DRAFTED, "token_position", first=0)
    accepted = samples.by_slot(ACCEPTED, "token_position", first=0)
    if offered:
        accepted += [0.0] * (len(offered) - len(accepted))
        return AcceptanceStatistics(offered[0], sum(offered), sum(accepted), offered, accepted, None, FACTS.title)
    if not samples.knows("trtllm_"):
        return None
    # How many verifications these came from is not told, and the gauge is of one iteration.
    return replace(
        AcceptanceStatistics.unknown(FACTS.title, samples.mean(ACCEPTANCE_LENGTH)),
        drafted=samples.total("trtllm_spec_decode_num_draft_tokens_total"),
        accepted=samples.total("trtllm_spec_decode_num_accepted_tokens_total"),
    )


FACTS = EngineFacts(
    title="TensorRT-LLM",
    engine_type="trtllm-serve",
    # Not /health_generate: a chat request of its own each time, which a full queue keeps waiting.
    probes=Probes(started="/health", live="/health", ready="/health"),
    metrics=MetricNames(
        path=PROMETHEUS,
        queued="trtllm_num_requests_waiting",
        running="trtllm_num_requests_running",
        kv_cache_usage="trtllm_kv_cache_utilization",
        acceptance_length=ACCEPTANCE_LENGTH,
        generated="trtllm_generation_tokens_total",
        time_to_first_token="trtllm_time_to_first_token_seconds",
        inter_token_latency="trtllm_time_per_output_token_seconds",
        queue_time="trtllm_request_queue_time_seconds",
        request_latency="trtllm_e2e_request_latency_seconds",
    ),
    speculation=SpeculationLines(
        acceptance_length=("{{pod}}", gauge(ACCEPTANCE_LENGTH, fold="avg")),
        survival=(
            "position {{token_position}}",
            f"{rate(ACCEPTED, by='token_position')} / {rate(DRAFTED, by='token_position')}",
        ),
    ),
    errors=("{{pod}}", rate("trtllm_request_error_total", by="pod")),
    refusals=REFUSALS,
    drafting_arguments=("speculative_config",),
    read_acceptance=read_acceptance,
    no_swap="trtllm-serve has no route that takes other weights of a drafter",
    environment={"TRTLLM_NO_USAGE_STATS": "1"},
)
