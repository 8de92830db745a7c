"""Facts about vLLM: the releases that were read and run, probes, metric names and readers."""

from __future__ import annotations

from dflash_serve.backend import EngineFacts, MetricNames, Probes, Releases, SpeculationLines
from dflash_serve.common.prometheus import Samples, Scrape, rate
from dflash_serve.common.settings import ENV_PREFIX
from dflash_serve.speculation.statistics import AcceptanceStatistics

RELEASES = Releases("vllm", "vLLM", (0, 32), (0, 33))
REAL_OFF = (0, 33)  # the first release whose drafter (V2 model runner) does not run where the width is 1
GUESSED_COSTS = f"{ENV_PREFIX}GUESSED_COSTS"
"""Environment variable: costs as JSON, guessed from the models' sizes. Served steps correct them."""

DRAFTS, DRAFTED, ACCEPTED = (
    f"vllm:spec_decode_{name}_total" for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
)
ACCEPTED_BY_SLOT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"

PREFIX = "dflash_vllm:"  # prefix of our plug-in's metrics, which stand on the same page as vLLM's
SLOTS_OFFERED, SLOTS_ACCEPTED = f"{PREFIX}slots_offered", f"{PREFIX}slots_accepted"
"""Counters by slot of the block; like STEPS without the `_total` that they are exported with."""
STEPS = f"{PREFIX}steps"  # counter of requests' decoding steps by width; width 1 = without a draft
SPECULATING = ', width!="1"'  # selects the steps that verified at least one drafted token


def read_acceptance(scrape: Scrape) -> AcceptanceStatistics | None:
    """Acceptance by our plug-in's counters where it is loaded, else by vLLM's own; None = not vLLM's metrics."""
    samples = scrape.samples()
    return _of_plug_in(samples) or _of_vllm(samples)


def _of_plug_in(samples: Samples) -> AcceptanceStatistics | None:
    widths = samples.by(f"{STEPS}_total", "width")
    if not widths or samples.total(DRAFTS) is None:
        return None
    offered = samples.by_slot(f"{SLOTS_OFFERED}_total", "slot", first=1)
    accepted = samples.by_slot(f"{SLOTS_ACCEPTED}_total", "slot", first=1)
    verifications = sum(count for width, count in widths.items() if width > 1)
    engine = f"{FACTS.title} with dflash-serve"
    return AcceptanceStatistics(verifications, sum(offered), sum(accepted), offered, accepted, widths, engine)


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
        survival=(
            "slot {{slot}}",
            f"{rate(f'{SLOTS_ACCEPTED}_total', by='slot')} / {rate(f'{SLOTS_OFFERED}_total', by='slot')}",
        ),
        widths=("width {{width}}", rate(f"{STEPS}_total", by="width")),
    ),
    # By hundreds (`4xx`), so those that were refused are not apart.
    errors=("{{status}}", rate("http_requests_total", by="status", extra=', status=~"[45].."')),
    read_acceptance=read_acceptance,
    server_flags=("api-key-file",),
    # Otherwise vLLM tells its authors what it serves, and on what.
    environment={"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
)
