"""A compose file: one server on one machine, as locked up as a pod. Needs Docker Compose 2.23.1 (inline configs)."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_serve.errors import UserError

from .pod import PROBE_SECONDS, READY_TIMEOUT
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

HEALTHY = "import urllib.request as r; r.urlopen('http://127.0.0.1:{port}{path}', timeout={timeout})"
"""The images have Python, and no curl."""


def compose(workload: Workload) -> Iterator[Document]:
    """The one document of a compose file.

    Raises:
        UserError: the deployment needs more than one machine.
    """
    if workload.deployment.parallel.nodes > 1:
        what = f"{workload.deployment.parallel.nodes} nodes do not fit into a compose file"
        raise UserError(what, where="parallel.nodes", do="use --render helm or manifests")
    # Compose replaces $NAME inside the text; $$ is a plain dollar.
    config = {"content": yaml_text(workload.fields).replace("$", "$$")}
    yield {
        "name": workload.name,
        "services": {"server": _service(workload)},
        "configs": {"deployment": config},
        "volumes": {"models": {}, "cache": {}, "prepared": {}},
    }


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
