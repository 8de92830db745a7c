"""One description, five forms: what `dflash-serve deploy --render` prints. The forms of one pod are made here.

KServe's is an InferenceService (serving.kserve.io/v1beta1, Standard mode, KServe 0.16 to 0.21). Not an
LLMInferenceService: its storage initialiser knows one model, and we have a target and a drafter. A compose file is one
server on one machine, as locked up as a pod; it needs Docker Compose 2.23.1 (inline configs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from dflash_serve.errors import UserError

from .chart import manifests, values
from .dynamo import dynamo
from .pod import PROBE_SECONDS, READY_TIMEOUT, config_map, pod
from .workload import (
    CACHE,
    CONFIG,
    DRAIN_SECONDS,
    MARGIN_SECONDS,
    MODELS,
    PORT,
    PREPARED,
    SHARED_MEMORY_GIB,
    USER,
    Document,
    Workload,
    yaml_text,
)

Form = Literal["helm", "manifests", "dynamo", "kserve", "compose"]
HEALTHY = "import urllib.request as r; r.urlopen('http://127.0.0.1:{port}{path}', timeout={timeout})"
"""The images have Python, and no curl."""


def render(workload: Workload, form: Form) -> str:
    """The YAML text, documents separated by `---`.

    Raises:
        UserError: the form has no words for this deployment.
    """
    return "---\n".join(yaml_text(document) for document in FORMS[form](workload))


def kserve(workload: Workload) -> Iterator[Document]:
    """The deployment's ConfigMap and the InferenceService.

    Raises:
        UserError: the deployment needs more than one node.
    """
    _refuse_several_nodes(workload, "a predictor of ours is one pod")
    yield config_map(workload)
    yield {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": workload.name,
            "labels": {**workload.selector, **workload.pod_labels},
            "annotations": {"serving.kserve.io/deploymentMode": "Standard", **workload.pod_annotations},
        },
        "spec": {"predictor": {**_replicas(workload), **pod(workload, "kserve-container")}},
    }


def _replicas(workload: Workload) -> dict[str, int]:
    return {"minReplicas": workload.replicas, "maxReplicas": workload.replicas}


def compose(workload: Workload) -> Iterator[Document]:
    """The one document of a compose file.

    Raises:
        UserError: the deployment needs more than one machine.
    """
    _refuse_several_nodes(workload, "a compose file is one machine's")
    if workload.replicas > 1:
        what = f"{workload.replicas} copies of the model, and a compose file is one server behind one port"
        raise UserError(what, where="parallel.data", do="use --backend sglang, which has them in one server, or helm")
    # Compose replaces $NAME inside the text; $$ is a plain dollar.
    config = {"content": yaml_text(workload.fields).replace("$", "$$")}
    yield {
        "name": workload.name,
        "services": {"server": _service(workload)},
        "configs": {"deployment": config},
        "volumes": {"models": {}, "cache": {}, "prepared": {}},
    }


def _refuse_several_nodes(workload: Workload, why: str) -> None:
    nodes = workload.deployment.parallel.nodes
    if nodes > 1:
        raise UserError(f"{nodes} nodes, and {why}", where="parallel.nodes", do="use --render helm or manifests")


def _service(workload: Workload) -> Document:
    ready = HEALTHY.format(port=PORT, path=workload.facts.probes.ready, timeout=READY_TIMEOUT)
    service: dict[str, object] = {
        "image": workload.container_image,
        "entrypoint": list(workload.command),
        "user": f"{USER}:{USER}",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "environment": {**workload.environment, "HF_TOKEN": None},  # null: taken from the caller's environment
        "configs": [{"source": "deployment", "target": CONFIG}],
        "volumes": [f"models:{MODELS}", f"cache:{CACHE}", f"prepared:{PREPARED}"],
        "tmpfs": ["/tmp"],  # noqa: S108 - the container's
        "shm_size": f"{SHARED_MEMORY_GIB}gb",
        "ports": [f"127.0.0.1:{PORT}:{PORT}"],
        "healthcheck": {
            "test": ["CMD", "python3", "-c", ready],
            "interval": f"{PROBE_SECONDS}s",
            "timeout": f"{READY_TIMEOUT + 5}s",
            "retries": 3,
            "start_period": f"{workload.startup_seconds}s",
        },
        "stop_grace_period": f"{DRAIN_SECONDS + MARGIN_SECONDS}s",
        "restart": "unless-stopped",
    }
    if workload.gpus:
        device = {"driver": "nvidia", "count": workload.gpus, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return service


FORMS: Mapping[Form, Callable[[Workload], Iterator[Document]]] = {
    "helm": values,
    "manifests": manifests,
    "dynamo": dynamo,
    "kserve": kserve,
    "compose": compose,
}
