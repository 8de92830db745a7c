"""What is deployed: a Deployment on a backend, under a name, from an image; and how its container runs, anywhere.

The chart has the same names and numbers; tests/deploy/test_render_chart.py holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

from dflash_serve.backend import backend
from dflash_serve.deployment import Deployment

from .ending import DRAIN_SECONDS

BackendName = Literal["torch", "sglang", "tensorrt-llm"]
BACKENDS: tuple[BackendName, ...] = ("torch", "sglang", "tensorrt-llm")

Document = Mapping[str, object]
"""One YAML document, as it is dumped."""

USER = 10001
"""User and group of the process: of the images, and of every pod."""
PORT = 8000
CONFIG = "/etc/dflash-serve/deployment.yaml"
MODELS = "/models"
"""Checkpoints from the hub."""
PREPARED = "/prepared"
"""What the engine reads is written here before it starts."""
CACHE = "/cache"
"""HOME: compiled kernels, cost tables."""
WRITABLE = (MODELS, PREPARED, CACHE, "/tmp")  # noqa: S108 - a mount of its own in every container
"""All the rest of the root file system is read-only."""

SHARED_MEMORY_GIB = 16
"""The processes of a tensor-parallel engine talk through it."""


@dataclass(frozen=True)
class Workload:
    """One node group: one process tree of one engine."""

    name: str
    """Of the Kubernetes objects and the compose project."""
    backend: BackendName
    deployment: Deployment
    image: str | None = None
    """None = the name that deploy/README.md builds it under."""

    @property
    def container_image(self) -> str:
        """As a container runtime is told."""
        return self.image or f"dflash-serve-{self.backend}:{version('dflash-serve')}"

    @property
    def gpus(self) -> int:
        """Devices on one node; the engines always need one, the embedded backend only where the deployment names it."""
        hardware, nodes = self.deployment.hardware, self.deployment.parallel.nodes
        if hardware.gpu == "none" or (hardware.gpu is None and self.backend == "torch"):
            return 0
        return max(1, hardware.count // nodes)

    @property
    def fields(self) -> Document:
        """The Deployment without what stands at its default."""
        return self.deployment.model_dump(mode="json", exclude_defaults=True)

    @property
    def command(self) -> tuple[str, ...]:
        """What the container runs; `serve` replaces itself by the engine."""
        listen = ("--host=0.0.0.0", f"--port={PORT}")
        drains = "drain-seconds" in backend(self.backend).facts.server_flags
        drain = (f"--drain-seconds={DRAIN_SECONDS}",) if drains else ()
        return ("dflash-serve", "serve", CONFIG, f"--backend={self.backend}", *listen, f"--folder={PREPARED}", *drain)

    @property
    def environment(self) -> dict[str, str]:
        """Beside the deployment's own file: what may be written, and how SGLang is probed."""
        found = {
            "HOME": CACHE,
            "USER": "dflash",  # libraries ask who they are, and 10001 has no name
            "XDG_CACHE_HOME": CACHE,
            "HF_HOME": f"{MODELS}/huggingface",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        if self.backend == "sglang":
            # Otherwise /health generates a token too, and a full batch would look like a dead process.
            found["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
        return found
