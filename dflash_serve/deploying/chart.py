"""Our Helm chart: its values for a workload, its manifests where helm is installed, and its generated files.

`python -m dflash_serve.deploying.chart` writes the generated files anew: the schema of its values, the engines that it
knows, Grafana's dashboard, and its README.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import yaml

from dflash_serve import deployment
from dflash_serve.backend import EngineFacts, backend
from dflash_serve.errors import UserError

from .chart_docs import attribute_docs, readme
from .chart_values import Values
from .chart_values_cluster import EngineProbes, EngineValues
from .dashboard import dashboard
from .workload import Document, Workload, yaml_text

CHART = "deploy/helm/dflash-serve"
KNOWN = ("torch", "sglang", "tensorrt-llm", "vllm")
"""Backends that the chart has images, checks and acceptance probes for; others bring their `engine` in the values."""
README = "README.md"
ARGUMENTS = "files/arguments.yaml"
SCHEMA, ENGINES, DASHBOARD = "values.schema.json", "files/engines.yaml", "dashboards/dflash-serve.json"
GIGABYTES_OF_MODELS = 500
"""What models.size holds unless it is said otherwise."""
DIALECT = "http://json-schema.org/draft-07/schema#"
"""Helm 3's validator knows no later one."""
GLOBAL = {"type": "object", "description": "Helm gives every subchart these; none is read."}


@runtime_checkable
class ArgumentBackend(Protocol):
    """A backend whose server takes arguments of the user's, but for those that keys of the deployment stand for."""

    def own_arguments(self, *, drafter: bool) -> Mapping[str, str]:
        """These by every name, with underscores, and the key or the reason of each.

        Args:
            drafter: those that only a drafter of ours takes away; else all others.
        """
        ...


def values(workload: Workload) -> Iterator[Document]:
    """The chart's values: the deployment as it is, and what Kubernetes must be told besides.

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
    yield {name: value for name, value in found.items() if value not in ({}, {"gigabytes": None}, 1)}


def _engine(facts: EngineFacts) -> Document:
    """An engine's facts as the chart's templates read them."""
    lines = facts.speculation
    engine = EngineValues(
        probes=EngineProbes(**asdict(facts.probes)),
        metrics_path=facts.metrics.path,
        queued=facts.metrics.queued,
        running=facts.metrics.running,
        generated=facts.metrics.generated,
        inter_token_latency=facts.metrics.inter_token_latency,
        queue_time=facts.metrics.queue_time,
        acceptance_length=lines.acceptance_length[1],
        survival=lines.survival and lines.survival[1],
        widths=lines.widths and lines.widths[1],
        needs_gpu=facts.needs_gpu,
        server_flags=list(facts.server_flags),
        environment=dict(facts.environment),
    )
    return engine.model_dump(by_alias=True)


def _room(gigabytes: int | None) -> dict[str, str]:
    """A larger /models than by default, where the weights need it; a tenth more, for what is fetched in pieces."""
    needed = math.ceil((gigabytes or 0) * 1.1)
    return {"size": f"{needed}G"} if needed > GIGABYTES_OF_MODELS else {}


def _image(image: str | None) -> dict[str, str]:
    if image is None:
        return {}
    repository, at, digest = image.partition("@")
    if not at:
        do = "give REPOSITORY@sha256:..., as `docker buildx imagetools inspect` says"
        raise UserError(f"{image} is not pinned: a tag can move under a running release", where="--image", do=do)
    return {"repository": repository, "digest": digest}


def manifests(workload: Workload) -> Iterator[Document]:
    """What `helm install` would apply, without a cluster's answer.

    Raises:
        UserError: helm is not installed, or refuses the values.
    """
    (given,) = values(workload)
    yield from (document for document in yaml.safe_load_all(template(workload.name, given)) if document)


def template(name: str, given: Document) -> str:
    """`helm template` on our chart.

    Raises:
        UserError: helm is not installed, or refuses the values.
    """
    helm = shutil.which("helm")
    if helm is None:
        do = "install helm 3.17 or newer (helm.sh), or take --render helm to where it is installed"
        raise UserError("helm is not installed, and manifests are what it makes of our chart", where="helm", do=do)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "values.yaml")
        file.write_text(yaml.safe_dump(dict(given), sort_keys=False), encoding="utf-8")
        argv = [helm, "template", name, str(chart()), "--values", str(file)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)  # noqa: S603 - found on PATH
    if done.returncode:
        raise UserError(" ".join(done.stderr.split()), where="helm template")
    return done.stdout


def chart() -> Path:
    """The chart's folder: it travels in the wheel beside this file, and stands in deploy/ of a checkout.

    Raises:
        UserError: neither is there.
    """
    here = Path(__file__).parent
    for folder in (here / "chart", here.parents[1] / CHART):
        if (folder / "Chart.yaml").is_file():
            return folder
    raise UserError("the chart is not there", where=str(here / "chart"), do="install dflash-serve again")


def values_schema() -> dict[str, Any]:
    """The JSON Schema of values.yaml, from the types of `chart_values` and the Deployment, for both Helm versions."""
    schema = _untitled(Values.model_json_schema(by_alias=True, ref_template="#/definitions/{model}"))
    definitions = schema.pop("$defs")
    for name, texts in attribute_docs(deployment).items():
        for field, text in texts.items():
            if field in definitions.get(name, {}).get("properties", {}):
                definitions[name]["properties"][field].setdefault("description", text)
    schema["properties"]["global"] = GLOBAL
    return {"$schema": DIALECT, "title": "dflash-serve", **schema, "definitions": definitions}


def _untitled(node: Any) -> Any:
    """Without pydantic's titles, which only repeat the names of keys."""
    if isinstance(node, list):
        return [_untitled(value) for value in node]
    if not isinstance(node, dict):
        return node
    return {key: _untitled(value) for key, value in node.items() if key != "title" or not isinstance(value, str)}


def generated_files() -> dict[str, str]:
    """Path in the chart -> text, of every file that is made from types and from engines' facts."""
    known = {name: backend(name) for name in KNOWN}
    engines = {name: _engine(each.facts) for name, each in known.items()}
    arguments = {
        name: {"always": dict(each.own_arguments(drafter=False)), "drafter": dict(each.own_arguments(drafter=True))}
        for name, each in known.items()
        if isinstance(each, ArgumentBackend)
    }
    made = f"# Made by `python -m {__spec__.name}` from the backends' "
    return {
        README: readme(values_schema()),
        SCHEMA: json.dumps(values_schema(), indent=2) + "\n",
        ENGINES: f"{made}facts.\n" + yaml_text(engines),
        ARGUMENTS: f"{made}tables.\n" + yaml_text(arguments),
        DASHBOARD: json.dumps(dashboard(), indent=1) + "\n",
    }


if __name__ == "__main__":
    for name, text in generated_files().items():
        (chart() / name).write_text(text, encoding="utf-8")
