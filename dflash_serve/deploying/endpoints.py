"""Where each engine's own server answers probes and scrapes, and what it calls the figures that a router picks by."""

from __future__ import annotations

from dataclasses import dataclass

from .workload import BackendName


@dataclass(frozen=True)
class Endpoints:
    """Paths on the one port, and names for the systems that we hand over to."""

    started: str
    """Everything is loaded."""
    live: str
    """Shallow: says no only when a new process would help."""
    ready: str
    """Deep: new requests are taken and answered."""
    metrics: str
    """Prometheus text."""
    engine_type: str
    """Value of the label `llm-d.ai/engine-type`, by which an endpoint picker finds the names below."""
    queued: str
    """Gauge: requests that wait."""
    running: str | None
    """Gauge: requests in the batch."""
    kv_cache_usage: str | None
    """Gauge from 0 to 1."""
    acceptance_length: str
    """Gauge, the bonus token counted; what Dynamo's planner calls tokens per decode forward."""


ENDPOINTS: dict[BackendName, Endpoints] = {
    "torch": Endpoints(
        started="/ready",
        live="/health",
        ready="/ready",
        metrics="/metrics",
        engine_type="dflash",
        queued="dflash:num_requests_waiting",
        running="dflash:num_requests_running",
        kv_cache_usage="dflash:kv_cache_usage_perc",
        acceptance_length="dflash:spec_decode_acceptance_length",
    ),
    "sglang": Endpoints(
        started="/health",
        live="/health",
        ready="/health_generate",
        metrics="/metrics",
        engine_type="sglang",
        queued="sglang:num_queue_reqs",
        running="sglang:num_running_reqs",
        kv_cache_usage="sglang:token_usage",
        acceptance_length="sglang:spec_accept_length",
    ),
    "tensorrt-llm": Endpoints(
        started="/health",
        live="/health",
        ready="/health_generate",
        metrics="/prometheus/metrics",
        engine_type="trtllm-serve",
        queued="trtllm_num_requests_waiting",
        running="trtllm_num_requests_running",
        kv_cache_usage="trtllm_kv_cache_utilization",
        acceptance_length="trtllm_spec_decode_acceptance_length",
    ),
}
"""SGLang: 0.5.23's server. TensorRT-LLM: tensorrt_llm/metrics/collector.py @050f80d. Labels: llm-d-router."""
