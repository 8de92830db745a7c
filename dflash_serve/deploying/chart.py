"""The Helm chart: its values for a deployment, the manifests that helm makes of them, and the chart to be packaged.

`python -m dflash_serve.deploying.chart FOLDER` writes the whole chart to a new folder, with the files that are made
from the code: the schema of its values, the engines that it knows, and Grafana's dashboard.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from dflash_serve.adapter.checks import uses_drafter
from dflash_serve.adapter.counters import EXPECTED, GAINED
from dflash_serve.adapter.draft_layouts import stored_bytes, with_pieces
from dflash_serve.adapter.facts import EngineFacts
from dflash_serve.adapter.registry import backend, server_backend
from dflash_serve.checkpoint.reader import read_config
from dflash_serve.checkpoint.source import drafter_source
from dflash_serve.checkpoint.target import read_target_layout, target_configuration
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.gpus import GIB
from dflash_serve.errors import UserError

from .dashboard import dashboard
from .values_schema import values_schema

Document = Mapping[str, Any]
Form = Literal["helm", "manifests", "dynamo"]

CHART = "deploy/helm/dflash-serve"
KNOWN = ("torch", "sglang", "tensorrt-llm", "vllm")
"""Backends that the chart has images and acceptance probes for; the values of another one contain its `engine`."""
SCHEMA, ENGINES, DASHBOARD = "values.schema.json", "files/engines.yaml", "dashboards/dflash-serve.json"
"""Files of the whole chart that are made from the code."""
UNITS = {"": 1, **{f"{prefix}i": 2 ** (10 * power) for power, prefix in enumerate("KMGT", 1)}}


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
    decode_host_bytes: int | None = None
    """Host memory of a decode server of a pair for retracted requests; None = none, or not known."""


def workload_of(name: str, backend: str, deployment: Deployment, image: str | None = None) -> Workload:
    """The workload of a deployment. An engine that holds one copy of the model gets a replica for each copy.

    Raises:
        UserError: the backend is not installed or has no server, or GPUs or requests cannot be shared evenly by the
            replicas.
    """
    copies, count = deployment.parallel.data, deployment.hardware.count
    if copies == 1 or server_backend(backend).facts.data_parallel:
        return Workload(name, backend, deployment, image)
    if count % copies:
        what = f"{count} GPUs (hardware.count) cannot be shared evenly by {copies} copies"
        raise UserError(what, where="parallel.data", do="use a divisor")
    limits = deployment.limits
    if limits.max_batch_size is not None:
        if limits.max_batch_size % copies:
            what = f"{limits.max_batch_size} requests cannot be shared evenly by {copies} copies"
            raise UserError(what, where="limits.max_batch_size", do=f"use a multiple of {copies}")
        limits = limits.model_copy(update={"max_batch_size": limits.max_batch_size // copies})
    one = {
        "limits": limits,
        "parallel": deployment.parallel.model_copy(update={"data": 1}),
        "hardware": deployment.hardware.model_copy(update={"count": count // copies}),
    }
    return Workload(name, backend, deployment.model_copy(update=one), image, copies)


def render(workload: Workload, form: Form) -> str:
    """The chart's values, or the manifests of a release, as YAML.

    Raises:
        UserError: the image is not pinned by its digest, or helm is not installed or refuses the values.
    """
    given = values(workload)
    return _yaml(given) if form == "helm" else template(workload.name, given)


def values(workload: Workload) -> Document:
    """The values that differ from the chart's defaults.

    Raises:
        UserError: the image is not pinned by its digest.
    """
    facts, deployment = server_backend(workload.backend).facts, workload.deployment
    # llm-d's endpoint picker reads the engine, and the half of a pair that a server is.
    labels = {"llm-d.ai/inference-serving": "true", "llm-d.ai/engine-type": facts.engine_type}
    gigabytes = _gigabytes(deployment)
    found = {
        "backend": workload.backend,
        "engine": {} if workload.backend in KNOWN else _engine(facts),
        "deployment": deployment.model_dump(mode="json", exclude_defaults=True),
        "image": _image(workload.image),
        "replicas": workload.replicas,
        "pair": {"decodeHostGi": math.ceil(workload.decode_host_bytes / GIB)} if workload.decode_host_bytes else {},
        "models": _room(gigabytes),
        "startup": {} if gigabytes is None else {"gigabytes": gigabytes},
        "podLabels": labels if deployment.role == "whole" else {**labels, "llm-d.ai/role": deployment.role},
        "podAnnotations": dict(facts.prefill_annotations) if deployment.role == "prefill" else {},
    }
    return {name: value for name, value in found.items() if value not in ({}, 1)}


def _engine(facts: EngineFacts) -> Document:
    # An engine's facts under the names by which the chart's templates read them.
    metrics, lines = facts.metrics, facts.speculation
    return {
        "probes": asdict(facts.probes),
        "metricsPath": metrics.path,
        "queued": metrics.queued,
        "running": metrics.running,
        "generated": metrics.generated,
        "interTokenLatency": metrics.inter_token_latency,
        "queueTime": metrics.queue_time,
        "acceptanceLength": lines.acceptance_length[1],
        "survival": lines.survival and lines.survival[1],
        "widths": lines.widths and lines.widths[1],
        "tokensGained": lines.headroom and f"{GAINED}_total",
        "tokensExpected": lines.headroom and f"{EXPECTED}_total",
        "needsGpu": facts.needs_gpu,
        "serverFlags": list(facts.server_flags),
        "environment": dict(facts.environment),
        "prefillAnnotations": dict(facts.prefill_annotations),
    }


def _gigabytes(deployment: Deployment) -> int | None:
    # Size of both checkpoints, rounded up; None if no config.json tells it (the bundled target).
    # An engine that converts the target to fp8 still downloads and reads all of its bf16 weights.
    stored = deployment.target.model_copy(update={"quantization": "none"})
    try:
        size = read_target_layout(target_configuration(stored), stored).weight_bytes
    except UserError:
        return None
    if uses_drafter(deployment) and deployment.drafter is not None:
        source = drafter_source(deployment.drafter.model)
        block_size = deployment.speculation.block_size
        config, checkpoint = read_config(source, deployment.drafter.revision, block_size=block_size)
        size += stored_bytes(with_pieces(checkpoint), config)
    return math.ceil(size / 1e9)


def _room(gigabytes: int | None) -> dict[str, str]:
    # A larger volume than the chart's default where the weights, and a tenth more for downloads, do not fit it.
    default = str(yaml.safe_load((chart() / "values.yaml").read_text(encoding="utf-8"))["models"]["size"])
    number = default.rstrip("KMGTi")
    needed = math.ceil((gigabytes or 0) * 1.1)
    return {"size": f"{needed}G"} if needed * 10**9 > int(number) * UNITS[default.removeprefix(number)] else {}


def _image(image: str | None) -> dict[str, str]:
    if image is None:
        return {}
    repository, at, digest = image.partition("@")
    if not at:
        do = "give REPOSITORY@sha256:..., as `docker buildx imagetools inspect` prints it"
        raise UserError(f"{image} is not pinned: a tag can move under a running release", where="--image", do=do)
    return {"repository": repository, "digest": digest}


def template(name: str, given: Document) -> str:
    """The objects that `helm install` would apply, in HELM_NAMESPACE; without the pods of `helm test`.

    Raises:
        UserError: helm is not installed, or refuses the values.
    """
    helm = shutil.which("helm")
    if helm is None:
        do = "install helm 3.17 or newer (helm.sh), or use --render helm and take the values to a machine with helm"
        raise UserError("not installed; it makes the manifests from the chart", where="helm", do=do)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "values.yaml")
        file.write_text(_yaml(given), encoding="utf-8")
        argv = [helm, "template", name, str(write_chart(Path(folder, "chart"))), "--values", str(file), "--skip-tests"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)  # noqa: S603 - found on PATH
    if done.returncode:
        raise UserError(" ".join(done.stderr.split()), where="helm template")
    return done.stdout


def chart() -> Path:
    """The chart's folder: beside this file in an installed package, in deploy/ in a checkout.

    Raises:
        UserError: neither is there.
    """
    here = Path(__file__).parent
    for folder in (here / "chart", here.parents[1] / CHART):
        if (folder / "Chart.yaml").is_file():
            return folder
    raise UserError("the chart is not there", where=str(here / "chart"), do="install dflash-serve again")


def write_chart(folder: Path) -> Path:
    """Writes the whole chart to a folder that is not there yet, and returns the folder.

    Raises:
        UserError: the folder is there already, or cannot be written.
    """
    try:
        shutil.copytree(chart(), folder)
    except OSError as error:
        do = "name a folder that is not there yet"
        raise UserError(f"cannot be written: {error.strerror or error}", where=str(folder), do=do) from error
    made = {
        SCHEMA: json.dumps(values_schema(folder / "values.yaml"), indent=2),
        ENGINES: _yaml({name: _engine(backend(name).facts) for name in KNOWN}),
        DASHBOARD: json.dumps(dashboard(), indent=1),
    }
    for name, text in made.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    return folder


def _yaml(document: Document) -> str:
    return yaml.safe_dump(dict(document), sort_keys=False, width=120)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("usage: python -m dflash_serve.deploying.chart FOLDER", file=sys.stderr)
        sys.exit(2)
    write_chart(Path(sys.argv[1]))
