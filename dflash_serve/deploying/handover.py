"""Hand-over to what carries more than one node group: labels and annotations of our pods. No router of ours."""

from __future__ import annotations

from .endpoints import ENDPOINTS
from .workload import Workload

BOOTSTRAP_PORT = 8998
"""SGLang's default of --disaggregation-bootstrap-port: where a prefill server tells decoding ones of its K/V."""


def selector(workload: Workload) -> dict[str, str]:
    """What the SGLang gateway, an InferencePool or a PodMonitor finds our pods by; the chart sets them itself."""
    return {"app.kubernetes.io/name": "dflash-serve", "app.kubernetes.io/instance": workload.name}


def pod_labels(workload: Workload) -> dict[str, str]:
    """What llm-d's endpoint picker reads: which engine's metric names these are, and which half of a pair."""
    found = {
        "llm-d.ai/inference-serving": "true",
        "llm-d.ai/engine-type": ENDPOINTS[workload.backend].engine_type,
    }
    role = workload.deployment.role
    return found if role == "whole" else {**found, "llm-d.ai/role": role}


def pod_annotations(workload: Workload) -> dict[str, str]:
    """The SGLang gateway reads the bootstrap port of a prefill server here."""
    prefill = workload.backend == "sglang" and workload.deployment.role == "prefill"
    return {"sglang.ai/bootstrap-port": str(BOOTSTRAP_PORT)} if prefill else {}
