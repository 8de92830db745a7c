"""Names of the embedded server's probes and metrics (`server.worker` writes them), and their readers."""

from __future__ import annotations

from dflash_serve.backend import EngineFacts, MetricNames, Probes, SpeculationLines
from dflash_serve.common.prometheus import Scrape, gauge, rate
from dflash_serve.speculation.statistics import AcceptanceStatistics

PREFIX = "dflash:"
# Counters, without `_total`, with vLLM's names.
DRAFTS, DRAFTED, ACCEPTED = (
    f"{PREFIX}spec_decode_{name}" for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
)
ACCEPTED_BY_SLOT, WIDTHS = f"{PREFIX}spec_decode_num_accepted_tokens_per_pos", f"{PREFIX}spec_decode_width"
SURVIVAL, ACCEPTANCE_LENGTH = f"{PREFIX}spec_decode_survival", f"{PREFIX}spec_decode_acceptance_length"
QUEUED, RUNNING = f"{PREFIX}num_requests_waiting", f"{PREFIX}num_requests_running"
CACHE_USAGE = f"{PREFIX}kv_cache_usage_perc"
PROMPT_TOKENS, CACHED_TOKENS = f"{PREFIX}prompt_tokens", f"{PREFIX}prompt_tokens_cached"
REQUESTS_ENDED, REQUESTS_REFUSED = f"{PREFIX}request_success", f"{PREFIX}request_refused"

SETTINGS_PREFIX = "DFLASH_SERVE_HTTP_"  # environment variables of `server.settings`
SERVER_FLAGS = ("served-model-name", "api-key-file", "drain-seconds", "acceptance-metrics")


def read_acceptance(scrape: Scrape) -> AcceptanceStatistics | None:
    """Reads the embedded server's counters; the number of tests of each slot follows from the widths."""
    samples = scrape.samples()
    verifications = samples.total(f"{DRAFTS}_total")
    if verifications is None:
        return None
    widths = samples.by(f"{WIDTHS}_total", "width")
    accepted = samples.by_slot(f"{ACCEPTED_BY_SLOT}_total", "position", first=0)
    offered = [sum(n for width, n in widths.items() if width > slot) for slot in range(1, len(accepted) + 1)]
    return AcceptanceStatistics(
        verifications,
        samples.total(f"{DRAFTED}_total"),
        samples.total(f"{ACCEPTED}_total"),
        offered,
        accepted,
        widths,
        FACTS.title,
    )


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
    speculation=SpeculationLines(
        acceptance_length=(
            "{{pod}}",
            f"1 + {rate(f'{ACCEPTED}_total', by='pod')} / {rate(f'{DRAFTS}_total', by='pod')}",
        ),
        survival=("slot {{slot}}", gauge(SURVIVAL, by="slot", fold="avg")),
        widths=("width {{width}}", rate(f"{WIDTHS}_total", by="width")),
    ),
    errors=("{{pod}}", rate(f"{REQUESTS_ENDED}_total", by="pod", extra=', finished_reason="error"')),
    refused=("{{status}}", rate(f"{REQUESTS_REFUSED}_total", by="status")),
    read_acceptance=read_acceptance,
    needs_gpu=False,
    server_flags=SERVER_FLAGS,
)
