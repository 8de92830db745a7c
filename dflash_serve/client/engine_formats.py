"""Engines' metrics, each in its own words, as readings under one definition.

| engine | steps | drafted, accepted | by slot |
|---|---|---|---|
| dflash-serve (`dflash:`) and vLLM (`vllm:`) | `spec_decode_num_drafts` | counters | accepted only |
| SGLang with our plug-in (`dflash_serve:`) | `steps` by width (the anchor counted) | sums over slots | counters |
| SGLang (`sglang:`, 0.5.23) | `spec_verify_calls` | from tokens generated | unknown |
| TensorRT-LLM (`trtllm_`, `/prometheus/metrics`) | drafted tokens of position 0 | counters | counters |
| TensorRT-LLM (`/metrics`, JSON) | `numRequestsWithDraftTokens` | sums over iterations | unknown |

SGLang's counters move when a request ends, so its answers' last blocks count only as far as they were used.
TensorRT-LLM's JSON is emptied by reading it and keeps 1,000 iterations: it is no counter, but what happened since.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash_serve.client.acceptance_reading import AcceptanceReading, Numbers, counted
from dflash_serve.errors import UserError


def read_text(text: str, *, where: str = "/metrics") -> AcceptanceReading:
    """A reading from Prometheus text, of whichever engine.

    Raises:
        UserError: it is not Prometheus text.
    """
    samples = _Samples(text, where)
    for read in (_plug_in, _embedded, _vllm, _sglang, _tensorrt_llm):
        found = read(samples)
        if found is not None:
            return found
    return AcceptanceReading()


def read_iterations(iterations: Sequence[Any], known: AcceptanceReading | None = None) -> AcceptanceReading:
    """A reading from TensorRT-LLM's iteration statistics; `known` where they hold no speculation."""
    stats = [
        entry["specDecodingStats"] for entry in iterations if isinstance(entry, dict) and "specDecodingStats" in entry
    ]
    if not stats:
        return known or AcceptanceReading(engine="TensorRT-LLM")
    steps, drafted, accepted = (
        float(sum(each.get(key) or 0 for each in stats))
        for key in ("numRequestsWithDraftTokens", "numDraftTokens", "numAcceptedTokens")
    )
    return counted("TensorRT-LLM", steps, drafted, accepted, drained=True)


class _Samples:
    """Prometheus samples by name; label sets (ranks, models) are summed."""

    def __init__(self, text: str, where: str) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        try:
            families = list(text_string_to_metric_families(text))
        except ValueError as error:
            raise UserError(f"not Prometheus text ({error})", where=where) from None
        self.all = [sample for family in families for sample in family.samples]

    def named(self, name: str) -> Iterator[tuple[Mapping[str, str], float]]:
        return ((sample.labels, sample.value) for sample in self.all if sample.name == name)

    def total(self, name: str) -> float | None:
        values = [value for _, value in self.named(name)]
        return sum(values) if values else None

    def mean(self, name: str) -> float | None:
        """Of a gauge that says 0 while it knows nothing."""
        values = [value for _, value in self.named(name) if value > 0]
        return sum(values) / len(values) if values else None

    def by(self, name: str, label: str) -> dict[int, float]:
        counts: dict[int, float] = {}
        for labels, value in self.named(name):
            if labels.get(label, "").isdecimal():
                counts[int(labels[label])] = counts.get(int(labels[label]), 0.0) + value
        return counts


def _plug_in(samples: _Samples) -> AcceptanceReading | None:
    widths = samples.by("dflash_serve:steps_total", "width")
    if not widths:
        return None
    offered = _from(samples.by("dflash_serve:slots_offered_total", "slot"), 1)
    survived = _from(samples.by("dflash_serve:slots_accepted_total", "slot"), 1)
    steps = sum(count for width, count in widths.items() if width > 1)
    return counted(
        "SGLang with dflash-serve",
        steps,
        sum(offered),
        sum(survived),
        offered=offered,
        survived=survived,
        widths=widths,
    )


def _embedded(samples: _Samples) -> AcceptanceReading | None:
    steps, drafted, accepted = _vllm_counters(samples, "dflash:")
    if steps is None:
        return None
    widths = samples.by("dflash:spec_decode_width_total", "width")
    survived = _from(samples.by("dflash:spec_decode_num_accepted_tokens_per_pos_total", "position"), 0)
    offered = tuple(
        sum(count for width, count in widths.items() if width > slot) for slot in range(1, len(survived) + 1)
    )
    return counted("dflash-serve", steps, drafted, accepted, offered=offered, survived=survived, widths=widths)


def _vllm(samples: _Samples) -> AcceptanceReading | None:
    steps, drafted, accepted = _vllm_counters(samples, "vllm:")
    if steps is None:
        return None
    survived = _from(samples.by("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"), 0)
    # Which slots were drafted is not told; where all were in (nearly) every step, each was offered in each.
    whole = drafted is not None and survived and drafted >= 0.99 * steps * len(survived)
    return counted(
        "vLLM", steps, drafted, accepted, offered=(steps,) * len(survived) if whole else None, survived=survived
    )


def _vllm_counters(samples: _Samples, prefix: str) -> tuple[float | None, float | None, float | None]:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    steps, drafted, accepted = (samples.total(f"{prefix}spec_decode_{name}_total") for name in names)
    return steps, drafted, accepted


def _sglang(samples: _Samples) -> AcceptanceReading | None:
    name = "SGLang"
    gauge, block = samples.mean("sglang:spec_accept_length"), samples.mean("sglang:spec_num_draft_tokens")
    steps = samples.total("sglang:spec_verify_calls_total")
    generated, requests = samples.total("sglang:generation_tokens_total"), samples.total("sglang:num_requests_total")
    if steps is None or generated is None or requests is None:
        known = gauge is not None or any(sample.name.startswith("sglang:") for sample in samples.all)
        return AcceptanceReading(acceptance_length=gauge, engine=name) if known else None
    # A request's first token comes from its prefill, every other one from a verification; SGLang counts the anchor.
    accepted = max(0.0, generated - requests - steps)
    return counted(name, steps, steps * (block - 1) if block else None, accepted)


def _tensorrt_llm(samples: _Samples) -> AcceptanceReading | None:
    name = "TensorRT-LLM"
    offered = _from(samples.by("trtllm_spec_decode_drafted_tokens_total", "token_position"), 0)
    survived = _from(samples.by("trtllm_spec_decode_accepted_tokens_total", "token_position"), 0)
    if offered:
        survived += (0.0,) * (len(offered) - len(survived))
        return counted(name, offered[0], sum(offered), sum(survived), offered=offered, survived=survived)
    drafted = samples.total("trtllm_spec_decode_num_draft_tokens_total")
    accepted = samples.total("trtllm_spec_decode_num_accepted_tokens_total")
    gauge = samples.mean("trtllm_spec_decode_acceptance_length")
    known = any(sample.name.startswith("trtllm_") for sample in samples.all)
    # How many verifications these came from is not told, and the gauge is of one iteration.
    return AcceptanceReading(None, drafted, accepted, None, gauge, name) if known else None


def _from(counts: Mapping[int, float], first: int) -> Numbers:
    """Counts by slot as a tuple from slot `first` on; a slot that was never counted is 0."""
    return tuple(counts.get(slot, 0.0) for slot in range(first, max(counts, default=first - 1) + 1))
