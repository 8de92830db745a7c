"""Kubernetes 1.30 to 1.37 and the operators' definitions accept every field of every manifest.

The oldest and the newest are tried; with DFLASH_SERVE_TEST_DEPLOY=all those between, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.chart import CASES, EVERYTHING, Manifest, case, of_kind, pods, render

OLDEST, NEWEST = 30, 37
VERSIONS = [f"1.{minor}" for minor in (range(OLDEST, NEWEST + 1) if EVERYTHING else (OLDEST, NEWEST))]
SCHEMAS = Path(__file__).parent / "schemas"
CUSTOM = {
    "ComputeDomain",
    "HTTPRoute",
    "InferencePool",
    "LeaderWorkerSet",
    "PodMonitor",
    "PrometheusRule",
    "ScaledObject",
}
LATER = {
    "sglang-from-a-model-image": ("1.31", "'image' was unexpected"),
    "sglang-in-one-nvlink-domain": ("1.31", "'resourceClaimTemplateName' was unexpected"),
}
"""Installations whose pods an older Kubernetes refuses: the first release that accepts them, and the message."""

jsonschema: Any = import_module("jsonschema")
kubernetes_validate: Any = import_module("kubernetes_validate.utils")
# It reads megabytes of definitions again for every object: 10 ms each, 1 ms with this.
kubernetes_validate.schema_contents = cache(kubernetes_validate.schema_contents)


@cache
def schema(kind: str) -> Manifest:
    parsed: Manifest = json.loads((SCHEMAS / f"{kind.lower()}.json").read_text())
    return parsed


def check(manifests: list[Manifest], version: str) -> None:
    """Raises a ValidationError that names the field."""
    for manifest in manifests:
        if manifest["kind"] in CUSTOM:
            jsonschema.validate(manifest, schema(manifest["kind"]))
        else:
            kubernetes_validate.validate(manifest, version, strict=True)
    for manifest in of_kind(manifests, "LeaderWorkerSet"):
        for _, pod in pods([manifest]):
            template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": pod}
            kubernetes_validate.validate(template, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_every_installation_is_taken(name: str, version: str) -> None:
    first, words = LATER.get(name, (version, ""))
    if version < first:
        with pytest.raises(kubernetes_validate.ValidationError, match=words):
            check(render(case(name)), version)
        return
    check(render(case(name)), version)


def test_all_kinds_are_among_them() -> None:
    kinds = {manifest["kind"] for name in CASES for manifest in render(case(name))}
    assert kinds >= {*CUSTOM, "CronJob", "Deployment", "HorizontalPodAutoscaler", "Job", "PersistentVolumeClaim"}


@pytest.mark.parametrize("kind", sorted(CUSTOM))
def test_a_misspelt_field_of_a_custom_resource_is_found(kind: str) -> None:
    manifests = [manifest for name in CASES for manifest in of_kind(render(case(name)), kind)]
    broken = json.loads(json.dumps(manifests[0]))
    broken["spec"]["replica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        check([broken], VERSIONS[-1])


def test_the_checker_itself_agrees(tmp_path: Path) -> None:
    """The validator's own command line accepts one of them."""
    file = tmp_path / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(render(case("sglang"))))
    argv = [sys.executable, "-m", "kubernetes_validate", "--strict", "--kubernetes-version", "1.37", str(file)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
