"""Facts about vLLM: the releases that were read and run, probes, metric names and readers."""

from __future__ import annotations

from dflash_serve.adapter.counters import LINES, read_slot_counters, renamed, where_absent
from dflash_serve.adapter.facts import EngineFacts, MetricNames, Probes, Refusal, Releases
from dflash_serve.common.prometheus import Samples, Scrape, rate
from dflash_serve.common.settings import ENV_PREFIX
from dflash_serve.speculation.statistics import AcceptanceStatistics

RELEASES = Releases("vllm", "vLLM", (0, 32), (0, 33), "vllm.engine.arg_utils")
REAL_OFF = (0, 33)  # the first release whose drafter (V2 model runner) does not run where the width is 1
GUESSED_COSTS = f"{ENV_PREFIX}GUESSED_COSTS"
"""Environment variable: costs as JSON, guessed from the models' sizes. Served steps correct them."""

DRAFTS, DRAFTED, ACCEPTED = (
    f"vllm:spec_decode_{name}_total" for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
)
EARLIER = "dflash_vllm:"  # Prefix of our plug-in's counters in release 0.2; both are written until 0.4
ACCEPTED_BY_SLOT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"

REFUSALS = (
    Refusal(
        "speculation.draft_window",
        "vLLM has no window for drafters that were trained without one",
        "leave it out, or use --backend sglang",
        drafting=True,
    ),
    Refusal(
        "parallel.data",
        "one vLLM server has one copy of the model, not {value}: its copies cannot agree on a width",
        "`dflash-serve deploy` makes {value} replicas of it; to start one yourself, set it to 1",
    ),
    Refusal("parallel.nodes", "several nodes are not covered by this backend", "use --backend sglang"),
    Refusal(
        "parallel.context",
        "context parallelism is not covered by this backend",
        "set it to 1, or use the tensorrt-llm backend",
    ),
    Refusal(
        "parallel.pipeline",
        "pipeline parallelism with a drafter is not covered by this backend",
        "set it to 1 and raise parallel.tensor",
        drafting=True,
    ),
    Refusal(
        "parallel.attention_data",
        "data-parallel ranks of vLLM cannot agree on a width, and it drops the schedule with a warning",
        "set it to false, and run several servers behind a router",
    ),
    Refusal(
        "pair.transfer",
        "the halves of a pair on vLLM exchange K/V by NIXL, not by {value}",
        "set it to nixl, or use --backend sglang",
        ("mooncake", "mooncake_tcp"),
    ),
    Refusal(
        "kv_cache.dtype",
        "NVFP4 keys and values are not covered by this backend",
        "use fp8 or bfloat16",
        ("nvfp4",),
    ),
)


def read_acceptance(scrape: Scrape) -> AcceptanceStatistics | None:
    """Acceptance by our plug-in's counters where it is loaded, else by vLLM's own; None = not vLLM's metrics."""
    samples = scrape.samples()
    return read_slot_counters(samples, f"{FACTS.title} with dflash-serve", "vllm:") or _of_vllm(samples)


def _of_vllm(samples: Samples) -> AcceptanceStatistics | None:
    """vLLM counts verifications and tokens; accepted ones by position, drafted ones not."""
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


def read_pool(samples: Samples) -> float | None:
    """The pool's tokens, a label of the metric that has vLLM's cache settings (v1/metrics/loggers.py)."""
    told = [labels.get("kv_cache_size_tokens", "") for labels, _ in samples.named("vllm:cache_config_info")]
    return sum(map(float, told)) if told and all(one.isdecimal() for one in told) else None


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
    speculation=LINES,
    earlier=where_absent(renamed(EARLIER)),
    # By hundreds (`4xx`), so those that were refused are not apart.
    errors=("{{status}}", rate("http_requests_total", by="status", extra=', status=~"[45].."')),
    refusals=REFUSALS,
    drafting_arguments=("speculative_config", "spec_method"),
    read_acceptance=read_acceptance,
    kv_pool=read_pool,
    kv_reloaded=lambda samples: samples.total("vllm:external_prefix_cache_hits_total"),
    server_flags=("api-key-file",),
    # Of 0.32 and 0.33: `start_draft_weight_update` needs a weight transfer engine, all of which copy between GPUs, and
    # VLLM_SERVER_DEV_MODE=1, which opens every other route of that mode.
    no_swap="vLLM takes the weights of a drafter from another process's GPU alone, and not from a folder",
    # Otherwise vLLM tells its authors what it serves, and on what.
    environment={"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
)
