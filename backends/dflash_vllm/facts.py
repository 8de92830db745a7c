"""What vLLM's server calls its probes and metrics, from its documentation, and how to read them."""

from __future__ import annotations

from dflash_serve.backend import EngineFacts, MetricNames, Probes, SpeculationLines
from dflash_serve.common.prometheus import Scrape, rate
from dflash_serve.speculation.statistics import AcceptanceStatistics

DRAFTS, DRAFTED, ACCEPTED = (
    f"vllm:spec_decode_{name}_total" for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
)
ACCEPTED_BY_SLOT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


def read_acceptance(scrape: Scrape) -> AcceptanceStatistics | None:
    """vLLM counts verifications and tokens; accepted ones by position, drafted ones not."""
    samples = scrape.samples()
    verifications, drafted = samples.total(DRAFTS), samples.total(DRAFTED)
    if verifications is None:  # vLLM has these counters from the start where it speculates, at 0
        plain = AcceptanceStatistics(0, 0, 0, None, None, None, FACTS.title)
        return plain if samples.total(FACTS.metrics.generated) is not None else None
    accepted = samples.by_slot(ACCEPTED_BY_SLOT, "position", first=0)
    # Which slots were drafted is not told; where all were in (nearly) every step, each was offered in each.
    whole = drafted is not None and accepted and drafted >= 0.99 * verifications * len(accepted)
    offered = [verifications] * len(accepted) if whole else None
    return AcceptanceStatistics(
        verifications, drafted, samples.total(ACCEPTED), offered, accepted or None, None, FACTS.title
    )


FACTS = EngineFacts(
    title="vLLM",
    engine_type="vllm",
    probes=Probes(started="/health", live="/health", ready="/health"),
    metrics=MetricNames(
        path="/metrics",
        queued="vllm:num_requests_waiting",
        running="vllm:num_requests_running",
        kv_cache_usage="vllm:kv_cache_usage_perc",
        acceptance_length=None,
        generated="vllm:generation_tokens_total",
        time_to_first_token="vllm:time_to_first_token_seconds",
        inter_token_latency="vllm:inter_token_latency_seconds",
        queue_time="vllm:request_queue_time_seconds",
        request_latency="vllm:e2e_request_latency_seconds",
    ),
    speculation=SpeculationLines(
        acceptance_length=("{{pod}}", f"1 + {rate(ACCEPTED, by='pod')} / {rate(DRAFTS, by='pod')}"),
    ),
    read_acceptance=read_acceptance,
)
