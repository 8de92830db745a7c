"""NVIDIA Dynamo's DynamoGraphDeployment (nvidia.com/v1beta1, Dynamo 1.6): its frontend, and our engine as its worker.

Dynamo starts the engine itself, so the engine's command line is translated, word by word; what cannot be is refused.
The worker's image is a layer of ours over Dynamo's own runtime image (deploy/docker, argument BASE).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dflash_serve.errors import UserError

from .pod import config_map, container_security, mounts, pod_security, resources, variables, volumes
from .workload import CONFIG, DRAIN_SECONDS, MARGIN_SECONDS, PREPARED, SHARED_MEMORY_GIB, Document, Workload

DYNAMO = "1.6.0"
"""The runtime inside the image: the image's tag is ours, so Dynamo cannot read it there."""
FRAMEWORKS = {"sglang": "sglang", "tensorrt-llm": "trtllm"}
LISTENING = {"--host", "--port", "--served-model-name", "--served_model_name"}
"""Dynamo's frontend listens, a worker does not; the model's name is always given."""
TRTLLM_OPTIONS = {"--config": "--extra-engine-args"}


def dynamo(workload: Workload) -> Iterator[Document]:
    """The deployment's ConfigMap and the graph.

    Raises:
        UserError: Dynamo has no such engine, or cannot be told what this deployment needs.
    """
    if workload.backend not in FRAMEWORKS:
        do = "use --backend sglang or tensorrt-llm"
        raise UserError("Dynamo has no such engine", where=f"--backend {workload.backend}", do=do)
    if workload.deployment.role != "whole":
        what = f"one half ({workload.deployment.role}) is not a graph"
        raise UserError(what, where="role", do="render a whole deployment, and split it in the graph")
    serving = workload.deployment.serving
    for key in ("reasoning_parser", "tool_call_parser"):
        if getattr(serving, key) is not None:
            what = "Dynamo's frontend parses answers itself, by parsers and names of its own"
            raise UserError(
                what, where=f"serving.{key}", do=f"leave it out, and give the worker --dyn-{key.replace('_', '-')}"
            )
    if serving.log_format == "json":
        do = "leave it out, and set DYN_LOGGING_JSONL=1 on the components"
        raise UserError("Dynamo writes the logs", where="serving.log_format", do=do)
    yield config_map(workload)
    yield {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": workload.name},
        "spec": {
            "backendFramework": FRAMEWORKS[workload.backend],
            "components": [_frontend(workload), _worker(workload)],
        },
    }


def worker_arguments(workload: Workload) -> tuple[str, list[str], Mapping[str, str]]:
    """Dynamo's module, its arguments and its environment for what the backend would start.

    Raises:
        UserError: an option that Dynamo's module does not have.
    """
    # As on one node: Dynamo's operator adds a node's place among several itself.
    parallel = workload.deployment.parallel.model_copy(update={"nodes": 1})
    alone = workload.deployment.model_copy(update={"parallel": parallel})
    command = workload.server.command(alone, Path(PREPARED))
    name = workload.deployment.serving.served_model_name or workload.deployment.target.model
    if workload.backend == "sglang":
        words = _without(LISTENING, command.argv[3:])  # python -m sglang.launch_server
        return "dynamo.sglang", [*words, "--served-model-name", name], command.env
    _, model, *words = command.argv
    options = _translated(_without(LISTENING, words))
    return "dynamo.trtllm", ["--model", model, "--served-model-name", name, *options], command.env


def _without(flags: set[str], words: Sequence[str]) -> list[str]:
    """The words without those flags and their values."""
    kept = iter(words)
    return [word for word in kept if word not in flags or not next(kept)]


def _translated(words: Sequence[str]) -> list[str]:
    unknown = [word for word in words if word.startswith("--") and word not in TRTLLM_OPTIONS]
    if unknown:
        what = f"this deployment needs trtllm-serve's {', '.join(unknown)}, which dynamo.trtllm does not have"
        raise UserError(what, where="--render dynamo", do="use --backend sglang, or --render helm")
    return [TRTLLM_OPTIONS.get(word, word) for word in words]


def _frontend(workload: Workload) -> Document:
    container = {"name": "main", "image": workload.container_image}
    return {**_component("frontend"), "podTemplate": {"spec": {"containers": [container]}}}


def _worker(workload: Workload) -> Document:
    nodes = workload.deployment.parallel.nodes
    pod = {
        "initContainers": [_preparing(workload)],
        "containers": [_engine(workload)],
        "securityContext": pod_security(),
        "terminationGracePeriodSeconds": DRAIN_SECONDS + MARGIN_SECONDS,
        "volumes": volumes(workload),
    }
    return {
        **_component("worker", workload.replicas),
        "sharedMemorySize": f"{SHARED_MEMORY_GIB}Gi",
        "podTemplate": {"spec": pod},
        **({} if nodes == 1 else {"multinode": {"nodeCount": nodes}}),
    }


def _engine(workload: Workload) -> Document:
    module, arguments, environment = worker_arguments(workload)
    added = [{"name": name, "value": value} for name, value in environment.items()]
    return {
        "name": "main",
        "image": workload.container_image,
        "command": ["python3", "-m", module],
        "args": arguments,
        "env": [*variables(workload), *added],
        "resources": resources(workload),
        # Not read-only: what Dynamo itself writes, and where, is Dynamo's business.
        "securityContext": {**container_security(), "readOnlyRootFilesystem": False},
        "volumeMounts": mounts(),
    }


def _preparing(workload: Workload) -> Document:
    """Writes what the engine reads, where its arguments say it is."""
    return {
        "name": "prepare",
        "image": workload.container_image,
        "command": ["dflash-serve", "deploy", CONFIG, "--backend", workload.backend, "--prepare", PREPARED],
        "env": variables(workload),
        "securityContext": container_security(),
        "volumeMounts": mounts(),
    }


def _component(name: str, replicas: int = 1) -> dict[str, object]:
    return {"name": name, "type": name, "replicas": replicas, "runtimeVersionOverride": DYNAMO}
