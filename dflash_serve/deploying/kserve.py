"""A KServe InferenceService (serving.kserve.io/v1beta1, Standard mode, KServe 0.16 to 0.21) around our own container.

Not an LLMInferenceService: its storage initialiser knows one model, and we have a target and a drafter.
"""

from __future__ import annotations

from collections.abc import Iterator

from dflash_serve.errors import UserError

from .handover import pod_annotations, pod_labels, selector
from .pod import config_map, pod
from .workload import Document, Workload


def kserve(workload: Workload, deployment_yaml: str) -> Iterator[Document]:
    """The deployment's ConfigMap and the service.

    Raises:
        UserError: the deployment needs more than one node.
    """
    if workload.deployment.parallel.nodes > 1:
        what = f"{workload.deployment.parallel.nodes} nodes, and a predictor of ours is one pod"
        raise UserError(what, where="parallel.nodes", do="use --render helm or manifests")
    yield config_map(workload, deployment_yaml)
    standard = {"serving.kserve.io/deploymentMode": "Standard"}
    yield {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": workload.name,
            "labels": {**selector(workload), **pod_labels(workload)},
            "annotations": {**standard, **pod_annotations(workload)},
        },
        "spec": {"predictor": {"minReplicas": 1, "maxReplicas": 1, **pod(workload, "kserve-container")}},
    }
