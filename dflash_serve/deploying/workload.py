"""What is deployed: a Deployment on a backend, under a name, from an image; and how its container runs and ends.

The chart has the same names and numbers; tests/deploy/test_render_chart.py holds the two together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version

import yaml

from dflash_serve.backend import EngineFacts, ServerBackend, server_backend
from dflash_serve.checkpoint.config import weight_bytes
from dflash_serve.checkpoint.reader import read_config
from dflash_serve.checkpoint.source import drafter_source
from dflash_serve.checkpoint.target import read_target_layout, target_configuration
from dflash_serve.deployment import Deployment
from dflash_serve.deployment_checks import uses_drafter
from dflash_serve.errors import UserError

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

BASE_SECONDS = 300
"""Compilation, graphs, warm-up."""
GIGABYTES_PER_SECOND = 0.5
"""From the hub or a slow volume."""
UNKNOWN_GIGABYTES = 64

PRE_STOP_SECONDS = 15
"""Between the pod's leaving the endpoints and SIGTERM: routers hear of it late."""
DRAIN_SECONDS = 120
"""What answers that have begun may take."""
MARGIN_SECONDS = 15
"""For the process to end by itself after the drain's deadline; a grace that equals it would be a race."""
GRACE_SECONDS = PRE_STOP_SECONDS + DRAIN_SECONDS + MARGIN_SECONDS
"""Kubernetes' terminationGracePeriodSeconds, which counts preStop too."""


@dataclass(frozen=True)
class Workload:
    """One node group: one process tree of one engine."""

    name: str
    """What the Kubernetes objects and the compose project are called."""
    backend: str
    """An installed backend that has a server."""
    deployment: Deployment
    image: str | None = None
    """None = the name that deploy/README.md builds it under."""
    replicas: int = 1
    """Servers of this deployment, each on GPUs of its own."""

    @cached_property
    def server(self) -> ServerBackend:
        """The backend itself.

        Raises:
            UserError: it is not installed, or has no server.
        """
        return server_backend(self.backend)

    @property
    def facts(self) -> EngineFacts:
        """What the engine calls its own things."""
        return self.server.facts

    @property
    def container_image(self) -> str:
        """The image as a container runtime is told."""
        return self.image or f"dflash-serve-{self.backend}:{version('dflash-serve')}"

    @property
    def gpus(self) -> int:
        """Devices on one node; an engine that can do without has some only where the deployment names them."""
        hardware, nodes = self.deployment.hardware, self.deployment.parallel.nodes
        if hardware.gpu == "none" or (hardware.gpu is None and not self.facts.needs_gpu):
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
        drain = (f"--drain-seconds={DRAIN_SECONDS}",) if "drain-seconds" in self.facts.server_flags else ()
        return ("dflash-serve", "serve", CONFIG, f"--backend={self.backend}", *listen, f"--folder={PREPARED}", *drain)

    @property
    def environment(self) -> dict[str, str]:
        """Beside the deployment's own file: what may be written, and what the engine must be told."""
        return {
            "HOME": CACHE,
            "USER": "dflash",  # libraries ask who they are, and 10001 has no name
            "XDG_CACHE_HOME": CACHE,
            "HF_HOME": f"{MODELS}/huggingface",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **self.facts.environment,
        }

    @property
    def selector(self) -> dict[str, str]:
        """What the SGLang gateway, an InferencePool or a PodMonitor finds our pods by; the chart sets them itself."""
        return {"app.kubernetes.io/name": "dflash-serve", "app.kubernetes.io/instance": self.name}

    @property
    def pod_labels(self) -> dict[str, str]:
        """What llm-d's endpoint picker reads: which engine's metric names these are, and which half of a pair."""
        found = {"llm-d.ai/inference-serving": "true", "llm-d.ai/engine-type": self.facts.engine_type}
        role = self.deployment.role
        return found if role == "whole" else {**found, "llm-d.ai/role": role}

    @property
    def pod_annotations(self) -> dict[str, str]:
        """What a router reads of a prefill server."""
        return dict(self.facts.prefill_annotations) if self.deployment.role == "prefill" else {}

    @property
    def gigabytes(self) -> int | None:
        """Weights of target and drafter, rounded up; None where no config.json says it (the bundled target)."""
        deployment = self.deployment
        try:
            target = read_target_layout(target_configuration(deployment.target), deployment.target).weight_bytes
        except UserError:
            return None
        drafter = 0
        if uses_drafter(deployment) and deployment.drafter is not None:
            source = drafter_source(deployment.drafter.model)
            drafter = weight_bytes(read_config(source, deployment.drafter.revision)[0])
        return math.ceil((target + drafter) / 1e9)

    @property
    def startup_seconds(self) -> int:
        """After so long a container that is not ready is started again."""
        return BASE_SECONDS + math.ceil((self.gigabytes or UNKNOWN_GIGABYTES) / GIGABYTES_PER_SECOND)


def workload_of(name: str, backend: str, deployment: Deployment, image: str | None = None) -> Workload:
    """The workload of a deployment; copies of the model that an engine has not in one server become replicas.

    Raises:
        UserError: the backend is not installed or has no server, or the GPUs cannot be shared evenly by the replicas.
    """
    copies, count = deployment.parallel.data, deployment.hardware.count
    if copies == 1 or server_backend(backend).facts.data_parallel:
        return Workload(name, backend, deployment, image)
    if count % copies:
        what = f"{count} GPUs (hardware.count) cannot be shared evenly by {copies} copies"
        raise UserError(what, where="parallel.data", do="use a divisor")
    one = {
        "parallel": deployment.parallel.model_copy(update={"data": 1}),
        "hardware": deployment.hardware.model_copy(update={"count": count // copies}),
    }
    return Workload(name, backend, deployment.model_copy(update=one), image, copies)


class _Dumper(yaml.SafeDumper):
    """Indents lists, and writes texts of several lines as blocks: people read these files."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _string)


def yaml_text(document: Document) -> str:
    """A document as YAML for people."""
    text: str = yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=120)
    return text
