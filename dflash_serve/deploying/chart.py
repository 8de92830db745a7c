"""Our Helm chart: its values for a workload, and its manifests where helm is installed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from dflash_serve.errors import UserError

from .handover import pod_annotations, pod_labels
from .startup import gigabytes
from .workload import Document, Workload

CHART = "deploy/helm/dflash-serve"


def values(workload: Workload, deployment_yaml: str) -> Iterator[Document]:
    """The chart's values: the deployment as it is, and what Kubernetes must be told besides.

    Raises:
        UserError: the image is not pinned by its digest.
    """
    found = {
        "backend": workload.backend,
        "deployment": yaml.safe_load(deployment_yaml),
        "image": _image(workload.image),
        "startup": {"gigabytes": gigabytes(workload)},
        "podLabels": pod_labels(workload),
        "podAnnotations": pod_annotations(workload),
    }
    yield {name: value for name, value in found.items() if value not in ({}, {"gigabytes": None})}


def _image(image: str | None) -> dict[str, str]:
    if image is None:
        return {}
    repository, at, digest = image.partition("@")
    if not at:
        what = f"{image} is not pinned: a tag can move under a running release"
        raise UserError(
            what, where="--image", do="give REPOSITORY@sha256:..., as `docker buildx imagetools inspect` says"
        )
    return {"repository": repository, "digest": digest}


def manifests(workload: Workload, deployment_yaml: str) -> Iterator[Document]:
    """What `helm install` would apply, without a cluster's answer.

    Raises:
        UserError: helm is not installed, or refuses the values.
    """
    (given,) = values(workload, deployment_yaml)
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
