"""A Deployment on a backend under a name: what of it the chart's values are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from dflash_serve.backend import EngineFacts, server_backend
from dflash_serve.checkpoint.config import weight_bytes
from dflash_serve.checkpoint.reader import read_config
from dflash_serve.checkpoint.source import drafter_source
from dflash_serve.checkpoint.target import read_target_layout, target_configuration
from dflash_serve.deployment import Deployment
from dflash_serve.deployment_checks import uses_drafter
from dflash_serve.errors import UserError

Document = Mapping[str, object]


@dataclass(frozen=True)
class Workload:
    """One kind of server: a deployment on one engine, with its image and its number of replicas."""

    name: str
    """Name of the Helm release."""
    backend: str
    """An installed backend that has a server."""
    deployment: Deployment
    image: str | None = None
    """REPOSITORY@sha256:DIGEST; None leaves the image out of the values."""
    replicas: int = 1
    """Servers of this deployment, each on GPUs of its own."""

    @property
    def facts(self) -> EngineFacts:
        """Paths, metric names and flags of the engine.

        Raises:
            UserError: the backend is not installed, or has no server.
        """
        return server_backend(self.backend).facts

    @property
    def fields(self) -> Document:
        """The Deployment without the keys that have their default."""
        return self.deployment.model_dump(mode="json", exclude_defaults=True)

    @property
    def pod_labels(self) -> dict[str, str]:
        """Labels that llm-d's endpoint picker reads: the engine, and the half of a pair that a server is."""
        found = {"llm-d.ai/inference-serving": "true", "llm-d.ai/engine-type": self.facts.engine_type}
        role = self.deployment.role
        return found if role == "whole" else {**found, "llm-d.ai/role": role}

    @property
    def pod_annotations(self) -> dict[str, str]:
        """Annotations that a router reads of a prefill server."""
        return dict(self.facts.prefill_annotations) if self.deployment.role == "prefill" else {}

    @property
    def gigabytes(self) -> int | None:
        """Size of both models' weights, rounded up; None if no config.json tells it (the bundled target)."""
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


def workload_of(name: str, backend: str, deployment: Deployment, image: str | None = None) -> Workload:
    """The workload of a deployment. An engine that holds one copy of the model gets a replica for each copy.

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
    """Indents lists, and writes texts of several lines as blocks."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _string)


def yaml_text(document: Document) -> str:
    """A document as readable YAML."""
    text: str = yaml.dump(dict(document), Dumper=_Dumper, sort_keys=False, width=120)
    return text
