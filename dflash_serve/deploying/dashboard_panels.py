"""What a user of DFlash wants to see, in PromQL, for all three engines: whichever runs fills the panels.

Acceptance length counts the bonus token, whichever engine says it. What an engine does not report is empty, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .endpoints import ENDPOINTS

WHERE = 'namespace=~"$namespace", app_kubernetes_io_instance=~"$release"'
"""Labels that the chart's PodMonitor puts on every series."""
WINDOW = "$__rate_interval"


@dataclass(frozen=True)
class Panel:
    """One graph: (what the line is called, PromQL) for each engine that can say it."""

    title: str
    about: str
    unit: str
    lines: Sequence[tuple[str, str]]


def rate(metric: str, *, by: str, extra: str = "") -> str:
    """Per second over the window, summed by labels."""
    return f"sum by ({by}) (rate({metric}{{{WHERE}{extra}}}[{WINDOW}]))"


def gauge(metric: str, *, by: str = "pod", fold: str = "sum") -> str:
    """A gauge as it stands."""
    return f"{fold} by ({by}) ({metric}{{{WHERE}}})"


def quantile(q: float, histogram: str) -> str:
    """Of a histogram, over all pods."""
    return f"histogram_quantile({q}, {rate(histogram + '_bucket', by='le')})"


def quantiles(*histograms: str) -> list[tuple[str, str]]:
    """Median and the slowest hundredth of each."""
    return [(f"p{100 * q:.0f}", quantile(q, name)) for name in histograms for q in (0.5, 0.99)]


INTER_TOKEN = (
    "dflash:inter_token_latency_seconds",
    "sglang:inter_token_latency_seconds",
    "trtllm_time_per_output_token_seconds",
)
NARROW = ', width="1"'
SPECULATION = [
    Panel(
        "Acceptance length",
        "Tokens gained per verification, the bonus token counted; 1 = speculation gains nothing.",
        "short",
        [
            (
                "{{pod}}",
                f"1 + {rate('dflash:spec_decode_num_accepted_tokens_total', by='pod')}"
                f" / {rate('dflash:spec_decode_num_drafts_total', by='pod')}",
            ),
            (
                "{{pod}}",
                f"1 + {rate('dflash_serve:slots_accepted_total', by='pod')}"
                f" / {rate('dflash_serve:steps_total', by='pod', extra=NARROW.replace('=', '!='))}",
            ),
            ("{{pod}}", gauge("trtllm_spec_decode_acceptance_length", fold="avg")),
        ],
    ),
    Panel(
        "Survival by slot",
        "Probability that a drafted token is accepted, by its slot in the block. A slot 1 near 0 is a drafter that "
        "does not fit: `dflash-serve doctor`.",
        "percentunit",
        [
            ("slot {{slot}}", gauge("dflash:spec_decode_survival", by="slot", fold="avg")),
            (
                "slot {{slot}}",
                f"{rate('dflash_serve:slots_accepted_total', by='slot')}"
                f" / {rate('dflash_serve:slots_offered_total', by='slot')}",
            ),
            (
                "position {{token_position}}",
                f"{rate('trtllm_spec_decode_accepted_tokens_total', by='token_position')}"
                f" / {rate('trtllm_spec_decode_drafted_tokens_total', by='token_position')}",
            ),
        ],
    ),
    Panel(
        "Width",
        "Verifications a second by slots verified, the anchor counted; 1 = drafting was found not to pay. TensorRT-LLM "
        "always verifies whole blocks.",
        "ops",
        [
            ("width {{width}}", rate("dflash:spec_decode_width_total", by="width")),
            ("width {{width}}", rate("dflash_serve:steps_total", by="width")),
        ],
    ),
]
FEELING = [
    Panel(
        "Interactivity",
        "Tokens a second that one user sees: one over the median time between tokens.",
        "short",
        [("tokens/s a user", f"1 / {quantile(0.5, name)}") for name in INTER_TOKEN],
    ),
    Panel("Time between tokens", "Inter-token latency; of a request, over its answer.", "s", quantiles(*INTER_TOKEN)),
    Panel(
        "Time to the first token",
        "From arrival, the time in the queue included.",
        "s",
        quantiles(
            "dflash:time_to_first_token_seconds",
            "sglang:time_to_first_token_seconds",
            "trtllm_time_to_first_token_seconds",
        ),
    ),
]
LOAD = [
    Panel(
        "Queue",
        "Requests that wait for a slot: what autoscaling looks at.",
        "short",
        [("{{pod}}", gauge(endpoints.queued)) for endpoints in ENDPOINTS.values()],
    ),
    Panel(
        "Running",
        "Requests in the batch.",
        "short",
        [("{{pod}}", gauge(endpoints.running)) for endpoints in ENDPOINTS.values() if endpoints.running],
    ),
    Panel(
        "Time in the queue",
        "From arrival to a slot.",
        "s",
        quantiles(
            "dflash:request_queue_time_seconds", "sglang:queue_time_seconds", "trtllm_request_queue_time_seconds"
        ),
    ),
    Panel(
        "Tokens",
        "Generated a second.",
        "short",
        [
            ("{{pod}}", rate(f"{prefix}generation_tokens_total", by="pod"))
            for prefix in ("dflash:", "sglang:", "trtllm_")
        ],
    ),
    Panel(
        "K/V in use",
        "Share of the store; near 1, requests are put back into the queue.",
        "percentunit",
        [
            ("{{pod}}", gauge(endpoints.kv_cache_usage, fold="max"))
            for endpoints in ENDPOINTS.values()
            if endpoints.kv_cache_usage
        ],
    ),
    Panel(
        "Whole answers",
        "From arrival to the last token.",
        "s",
        quantiles(
            "dflash:e2e_request_latency_seconds",
            "sglang:e2e_request_latency_seconds",
            "trtllm_e2e_request_latency_seconds",
        ),
    ),
]
ROWS = {"Speculation": SPECULATION, "What a user feels": FEELING, "Load": LOAD}
