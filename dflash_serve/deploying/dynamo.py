"""A deployment as a graph of NVIDIA Dynamo 1.6: its frontend, and the engine as a worker, or the halves of a pair.

Dynamo starts the engine itself, with the words of the engine's own command; an init container of our image writes the
files that these words name. Fields of the graph: ai-dynamo/dynamo, deploy/operator/api/v1beta1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from dflash_serve.adapter.protocol import Launch
from dflash_serve.adapter.registry import server_backend
from dflash_serve.errors import Problem

from .chart import Document, Workload

RELEASE = "1.6.1"
FRAMEWORKS = {"sglang": "sglang", "vllm": "vllm", "tensorrt-llm": "trtllm"}
"""Backend -> Dynamo's name of it; `dynamo.NAME` is its worker."""
EVENTS = json.dumps({"publisher": "zmq", "topic": "kv-events", "endpoint": "tcp://*:5557"})
FOLDERS = {"models": "/models", "prepared": "/prepared", "cache": "/cache", "tmp": "/tmp"}  # noqa: S108 - the pod's own
HUB = "/etc/dflash-serve-hub"  # where the token of the secret `hf-token` lies
DRAIN_SECONDS = 135


@dataclass(frozen=True)
class Component:
    """One kind of worker of the graph."""

    role: str  # `whole`, or the half
    replicas: int
    nodes: int
    gpus: int  # of one node
    words: Sequence[str]
    environment: Mapping[str, str]


def dynamo_problems(workload: Workload, launches: Sequence[Launch]) -> list[Problem]:
    """Parts of a deployment that Dynamo's workers do not take."""
    found = list[Problem]()
    if workload.backend not in FRAMEWORKS:
        do = f"use {', '.join(FRAMEWORKS)}, or --render manifests"
        return [Problem(f"Dynamo has no worker for {workload.backend}", "--backend", do)]
    serving = workload.deployment.serving
    for key in ("reasoning_parser", "tool_call_parser"):
        if getattr(serving, key) is not None:
            do = f"leave it out, and give the worker --dyn-{key.replace('_', '-')}"
            found.append(Problem("Dynamo's frontend parses answers, not the engine", f"serving.{key}", do))
    several = any(launch.deployment.parallel.nodes > 1 for launch in launches)
    if workload.backend == "tensorrt-llm":
        if several:
            what = "several nodes of TensorRT-LLM were not covered as a graph"
            found.append(Problem(what, "parallel.nodes", "use one node, or --backend sglang"))
        elif any("--custom_module_dirs" in launch.command(Path("/prepared")).argv for launch in launches):
            what = "this drafter needs --custom_module_dirs, which dynamo.trtllm does not have"
            found.append(Problem(what, "drafter.model", "use another drafter, or --render manifests"))
    return found


def graph(workload: Workload, launches: Sequence[Launch]) -> str:
    """The documents: a ConfigMap with the deployment, and the DynamoGraphDeployment."""
    described = workload.deployment.model_dump(mode="json", exclude_defaults=True)
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{workload.name}-deployment"},
        "data": {"deployment.yaml": yaml.safe_dump(described, sort_keys=False, width=110)},
    }
    workers = [_worker(workload, _component(workload, launch)) for launch in launches]
    deployment = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": workload.name},
        "spec": {
            "backendFramework": FRAMEWORKS[workload.backend],
            "components": [_frontend(workload), *workers],
        },
    }
    return "---\n".join(yaml.safe_dump(one, sort_keys=False, width=120) for one in (config, deployment))


def _component(workload: Workload, launch: Launch) -> Component:
    deployment = launch.deployment
    nodes, role = deployment.parallel.nodes, deployment.role
    pair = deployment.pair
    replicas = workload.replicas if pair is None else (pair.prefill if role == "prefill" else pair.decode).replicas
    gpus = 0 if deployment.hardware.gpu == "none" else deployment.hardware.count // nodes
    # Dynamo adds what tells the nodes of one server from each other.
    parallel = deployment.parallel.model_copy(update={"nodes": 1})
    command = replace(launch, deployment=deployment.model_copy(update={"parallel": parallel})).command(
        Path("/prepared")
    )
    served = deployment.serving.served_model_name or deployment.target.model
    words = worker_words(workload.backend, command.argv, role, served)
    return Component(role, replicas, nodes, gpus, words, command.env)


def worker_words(backend: str, argv: Sequence[str], role: str, served: str) -> list[str]:
    """The engine's command line as Dynamo's worker takes it: without a port, and with the target by a flag.

    Args:
        role: whole, prefill or decode.
        served: the model's name in requests, where the engine was told none.
    """
    words = list(argv)
    for flag in ("--host", "--port"):
        del words[words.index(flag) : words.index(flag) + 2]
    if backend == "sglang":
        words = words[words.index("sglang.launch_server") + 1 :]
    elif backend == "vllm":
        words = ["--model", *words[words.index("serve") + 1 :]]
    else:
        words = ["--model-path", *words[words.index("trtllm-serve") + 1 :]]
        words[words.index("--config")] = "--extra-engine-args"
    if "--served-model-name" not in words:
        words += ["--served-model-name", served]
    if role == "prefill" and backend == "sglang":  # the decode half asks it at its pod's address
        words += ["--host", "0.0.0.0"]  # noqa: S104
    if role != "whole" and backend == "vllm":
        words += ["--disaggregation-mode", role]
    if role != "decode" and backend == "sglang":  # the router sends prompts to where their prefixes are
        words += ["--kv-events-config", EVENTS]
    return words


def _frontend(workload: Workload) -> Document:
    env = [{"name": "DYN_ROUTER_MODE", "value": "kv"}, {"name": "DYN_MIGRATION_LIMIT", "value": "3"}]
    container = {"name": "main", "image": workload.image, "env": env}
    return {
        "name": "frontend",
        "type": "frontend",
        "replicas": 1,
        "runtimeVersionOverride": RELEASE,  # the image's tag is ours, so Dynamo cannot read its own release there
        "podTemplate": {"spec": {"containers": [container]}},
    }


def _worker(workload: Workload, component: Component) -> Document:
    name = "worker" if component.role == "whole" else component.role
    found: dict[str, Any] = {
        "name": name,
        "type": name,
        "replicas": component.replicas,
        "runtimeVersionOverride": RELEASE,
        "sharedMemorySize": "16Gi",
        "podTemplate": {"spec": _pod(workload, component)},
    }
    if component.nodes > 1:
        found["multinode"] = {"nodeCount": component.nodes}
    return found


def _pod(workload: Workload, component: Component) -> Document:
    mounts = [
        {"name": "config", "mountPath": "/etc/dflash-serve", "readOnly": True},
        {"name": "hub", "mountPath": HUB, "readOnly": True},
        *({"name": name, "mountPath": path} for name, path in FOLDERS.items()),
    ]
    shared = {"image": workload.image, "env": _environment(workload, component), "volumeMounts": mounts}
    prepare = ["dflash-serve", "deploy", "/etc/dflash-serve/deployment.yaml", "--backend", workload.backend]
    before = {"name": "prepare", **shared, "command": [*prepare, "--prepare", "/prepared"]}
    main: dict[str, Any] = {
        "name": "main",
        **shared,
        "command": ["python3", "-m", f"dynamo.{FRAMEWORKS[workload.backend]}"],
        "args": list(component.words),
    }
    if component.gpus:
        main["resources"] = {"limits": {"nvidia.com/gpu": str(component.gpus)}}
    hub = {"secretName": "hf-token", "optional": True, "items": [{"key": "token", "path": "token"}]}
    return {
        "initContainers": [{**before, "securityContext": _rights(read_only=True)}],
        "containers": [{**main, "securityContext": _rights(read_only=False)}],  # Dynamo writes files of its own
        "securityContext": {
            "runAsNonRoot": True,
            **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), 10001),
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": DRAIN_SECONDS,
        "volumes": [
            {"name": "config", "configMap": {"name": f"{workload.name}-deployment"}},
            {"name": "hub", "secret": hub},
            *({"name": name, "emptyDir": {}} for name in FOLDERS),
        ],
    }


def _environment(workload: Workload, component: Component) -> list[Document]:
    told = {
        "HOME": "/cache",
        "USER": "dflash",
        "XDG_CACHE_HOME": "/cache",
        "HF_HOME": "/models/huggingface",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_TOKEN_PATH": f"{HUB}/token",
        **server_backend(workload.backend).facts.environment,
        **component.environment,
    }
    if workload.deployment.serving.log_format == "json":
        told["DYN_LOGGING_JSONL"] = "1"
    found: list[Document] = [{"name": name, "value": value} for name, value in told.items()]
    if component.role != "whole" and workload.backend == "vllm":  # vLLM's own is localhost
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        found.append({"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": address})
    return found


def _rights(*, read_only: bool) -> Document:
    return {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": read_only,
        "capabilities": {"drop": ["ALL"]},
    }
