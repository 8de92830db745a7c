"""The Helm chart: its values for a workload, the manifests that helm makes of them, and the chart ready to be packaged.

`python -m dflash_serve.deploying.chart FOLDER` writes the whole chart, with the schema of its values, to a new folder.
Without a folder it writes the generated files of this checkout again: the engines that the chart knows, and Grafana's
dashboard.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import yaml

from dflash_serve.backend import EngineFacts, backend
from dflash_serve.errors import UserError

from .dashboard import dashboard
from .values_schema import values_schema
from .workload import Document, Workload, yaml_text

Form = Literal["helm", "manifests"]

CHART = "deploy/helm/dflash-serve"
KNOWN = ("torch", "sglang", "tensorrt-llm", "vllm")
"""Backends that the chart has images and acceptance probes for; the values of another one contain its `engine`."""
SCHEMA, ENGINES, DASHBOARD = "values.schema.json", "files/engines.yaml", "dashboards/dflash-serve.json"
UNITS = {"": 1, **{f"{prefix}i": 2 ** (10 * power) for power, prefix in enumerate("KMGT", 1)}}


def render(workload: Workload, form: Form) -> str:
    """The chart's values, or the manifests of a release, as YAML documents separated by `---`.

    Raises:
        UserError: the image is not pinned by its digest, or helm is not installed or refuses the values.
    """
    documents = [values(workload)] if form == "helm" else manifests(workload)
    return "---\n".join(yaml_text(document) for document in documents)


def values(workload: Workload) -> Document:
    """The values that differ from the chart's defaults.

    Raises:
        UserError: the image is not pinned by its digest.
    """
    found = {
        "backend": workload.backend,
        "engine": {} if workload.backend in KNOWN else _engine(workload.facts),
        "deployment": workload.fields,
        "image": _image(workload.image),
        "replicas": workload.replicas,
        "models": _room(workload.gigabytes),
        "startup": {"gigabytes": workload.gigabytes},
        "podLabels": workload.pod_labels,
        "podAnnotations": workload.pod_annotations,
    }
    return {name: value for name, value in found.items() if value not in ({}, {"gigabytes": None}, 1)}


def _engine(facts: EngineFacts) -> Document:
    """An engine's facts under the names by which the chart's templates read them."""
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
        "needsGpu": facts.needs_gpu,
        "serverFlags": list(facts.server_flags),
        "environment": dict(facts.environment),
    }


def _room(gigabytes: int | None) -> dict[str, str]:
    """A larger volume than the chart's default where the weights, and a tenth more for downloads, do not fit it."""
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


def manifests(workload: Workload) -> Iterator[Document]:
    """The objects that `helm install` would apply.

    Raises:
        UserError: helm is not installed, or refuses the values.
    """
    yield from (document for document in yaml.safe_load_all(template(workload.name, values(workload))) if document)


def template(name: str, given: Document) -> str:
    """The output of `helm template` on the chart with its schema.

    Raises:
        UserError: helm is not installed, or refuses the values.
    """
    helm = shutil.which("helm")
    if helm is None:
        do = "install helm 3.17 or newer (helm.sh), or use --render helm and take the values to a machine with helm"
        raise UserError("helm is not installed; it makes the manifests from the chart", where="helm", do=do)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "values.yaml")
        file.write_text(yaml.safe_dump(dict(given), sort_keys=False), encoding="utf-8")
        argv = [helm, "template", name, str(write_chart(Path(folder, "chart"))), "--values", str(file)]
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
    """Writes the chart with the schema of its values to a folder that is not there yet, and returns the folder.

    Raises:
        UserError: the folder is there already, or cannot be written.
    """
    try:
        shutil.copytree(chart(), folder)
    except OSError as error:
        do = "name a folder that is not there yet"
        raise UserError(f"cannot be written: {error.strerror or error}", where=str(folder), do=do) from error
    schema = json.dumps(values_schema(folder / "values.yaml"), indent=2) + "\n"
    (folder / SCHEMA).write_text(schema, encoding="utf-8")
    return folder


def generated_files() -> Mapping[str, str]:
    """Path in the chart and text of every file that is made from the backends' facts."""
    engines = {name: _engine(backend(name).facts) for name in KNOWN}
    made = "# Made by `python -m dflash_serve.deploying.chart` from the backends' facts.\n"
    return {ENGINES: made + yaml_text(engines), DASHBOARD: json.dumps(dashboard(), indent=1) + "\n"}


def _main(arguments: list[str]) -> None:
    if arguments:
        write_chart(Path(arguments[0]))
        return
    for name, text in generated_files().items():
        (chart() / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    _main(sys.argv[1:])
