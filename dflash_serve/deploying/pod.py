"""The pod of one server, for systems that take a pod and bring their own controller: KServe and Dynamo."""

from __future__ import annotations

import math

from .workload import (
    CONFIG,
    GRACE_SECONDS,
    PORT,
    PRE_STOP_SECONDS,
    SHARED_MEMORY_GIB,
    USER,
    WRITABLE,
    Document,
    Workload,
    yaml_text,
)

CONFIG_FOLDER, CONFIG_FILE = CONFIG.rsplit("/", 1)
TOKEN_FOLDER = "/etc/dflash-serve-hub"  # noqa: S105 - where it is mounted
PROBE_SECONDS = 10
READY_TIMEOUT = 30
"""SGLang's deep check gives up after 20 s by itself, and says why."""
SHARED_MEMORY: Document = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{SHARED_MEMORY_GIB}Gi"}}
"""Its volume; Dynamo's operator brings one of its own."""


def config_map(workload: Workload) -> Document:
    """The deployment's file as an object of its own."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{workload.name}-deployment"},
        "data": {CONFIG_FILE: yaml_text(workload.fields)},
    }


def volumes(workload: Workload) -> list[Document]:
    """The deployment's file, the hub's token where there is one, and every folder that may be written."""
    token = {"secretName": "hf-token", "optional": True, "items": [{"key": "token", "path": "token"}]}
    return [
        {"name": "config", "configMap": {"name": f"{workload.name}-deployment"}},
        {"name": "hub", "secret": token},
        *({"name": path.strip("/"), "emptyDir": {}} for path in WRITABLE),
    ]


def mounts() -> list[Document]:
    """Where the container finds `volumes`."""
    return [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "hub", "mountPath": TOKEN_FOLDER, "readOnly": True},
        *({"name": path.strip("/"), "mountPath": path} for path in WRITABLE),
    ]


def pod_security() -> Document:
    """No root, no system calls beyond the runtime's list."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Document:
    """Nothing can be gained, and nothing written but to the mounts."""
    return {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def variables(workload: Workload) -> list[Document]:
    """The environment in Kubernetes' form; a token that is not there is one that is not needed."""
    found = {**workload.environment, "HF_TOKEN_PATH": f"{TOKEN_FOLDER}/token"}
    return [{"name": name, "value": value} for name, value in found.items()]


def resources(workload: Workload) -> Document:
    """Devices only: processors and memory depend on the node, and are the user's to add."""
    return {"limits": {"nvidia.com/gpu": str(workload.gpus)}} if workload.gpus else {}


def pod(workload: Workload, name: str) -> Document:
    """The pod's specification around the server's container, which has that name."""
    return {
        "containers": [{"name": name, **_server(workload)}],
        "securityContext": pod_security(),
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # Kubernetes' DFLASH_SERVE_* variables would look like our settings
        "volumes": [*volumes(workload), SHARED_MEMORY],
    }


def _server(workload: Workload) -> Document:
    probes = workload.facts.probes
    loading = math.ceil(workload.startup_seconds / PROBE_SECONDS)
    return {
        "image": workload.container_image,
        "command": list(workload.command),
        "env": variables(workload),
        "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
        "startupProbe": _probe(probes.started, failures=loading),
        "livenessProbe": _probe(probes.live, failures=6),
        "readinessProbe": _probe(probes.ready, failures=3, timeout=READY_TIMEOUT),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
        "resources": resources(workload),
        "securityContext": container_security(),
        "volumeMounts": [*mounts(), {"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 - the kernel's own name
    }


def _probe(path: str, *, failures: int, timeout: int = 5) -> Document:
    get = {"path": path, "port": PORT}
    return {"httpGet": get, "periodSeconds": PROBE_SECONDS, "timeoutSeconds": timeout, "failureThreshold": failures}
