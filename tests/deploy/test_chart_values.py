"""Values, their types and their schema are one thing, and nothing is accepted that nobody reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from dflash_serve.backend import backend as backend_named
from dflash_serve.deploying.chart import ENGINES, generated_files, values_schema
from dflash_serve.deploying.chart_values import Values
from tests.deploy.test_chart_golden import CASES, case
from tests.deploy.test_chart_refusals import changed
from tests.support.chart import (
    BACKENDS,
    CHART,
    HELMS,
    Manifest,
    only,
    recipe_deployment,
    refusal,
    render,
    server,
    values,
)

GENERATED = generated_files()
OPEN = {
    "global": "Helm's own",
    "deployment.engine_args": "arguments of an engine's own server",
    "engine.environment": "an engine's own variables",
    "resources.extra": "extended resources",
    "placement.nodeSelector": "node labels",
    "service.annotations": "annotations",
    "placement.tolerations[]": "Kubernetes' own type",
    "extraVolumes[]": "Kubernetes' own type",
    "extraVolumeMounts[]": "Kubernetes' own type",
    "initContainers[]": "Kubernetes' own type",
    "labels": "labels",
    "podMonitor.labels": "labels",
    "alerts.labels": "labels",
    "dashboards.labels": "labels",
    "serviceAccount.annotations": "annotations",
    "podLabels": "labels",
    "podAnnotations": "annotations",
}
"""Where keys are the user's."""
MISSPELT = [
    *("replica", "deployment.targets", "deployment.target.modell", "deployment.drafter.quantisation"),
    *("deployment.speculation.widht", "deployment.parallel.tensors", "deployment.limits.batch"),
    *("deployment.kv_cache.dtyp", "deployment.hardware.gpus", "image.tag", "image.pullPolicies", "resources.gpu"),
    *("placement.product", "placement.topology.keys", "models.kinds", "secrets.hfToken", "secrets.apiKeys.value"),
    *("build.recipes", "build.image.tag", "startup.seconds", "readiness.accept", "drain.grace", "rollout.surge"),
    *("disruption.minAvailable", "autoscaling.metric", "service.ports", "networkPolicy.allow", "podMonitor.path"),
    *("dashboards.folder", "serviceAccount.automount", "tests.verify.url"),
]
WRONG = [
    *(
        {"engine": {"probes": {}}},
        {"replicas": "two"},
        {"deployment.hardware.gpu": "b100"},
        {"models.kind": "hostPath"},
    ),
    *({"deployment.speculation.width": "widest"}, {"deployment.parallel.tensor": 0}, {"autoscaling.kind": "both"}),
    *({"deployment.target.quantization": "int3"}, {"service.type": "ExternalName"}, {"env": [{"value": "A"}]}),
    *(
        {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "x"}}}]},
        {"image.pullPolicy": "Sometimes"},
        {"build.gpus": -1},
    ),
]


@pytest.mark.parametrize("name", GENERATED)
def test_what_is_generated_is_what_types_and_facts_make(name: str) -> None:
    """After a wanted change: python -m dflash_serve.deploying.chart"""
    assert (CHART / name).read_text() == GENERATED[name]


def test_the_chart_knows_the_backends_whose_drafters_its_probe_can_see_accept() -> None:
    known = yaml.safe_load(GENERATED[ENGINES])
    probe = (CHART / "files" / "ready.py").read_text().rpartition("ASK = {")[2].partition("}")[0]
    assert set(known) == set(BACKENDS) == set(re.findall(r'"([\w-]+)":', probe))


def test_values_yaml_has_every_default_of_the_types_and_no_other() -> None:
    written = yaml.safe_load((CHART / "values.yaml").read_text())
    assert written.pop("deployment") == {}
    minimal = Values.model_validate({"deployment": {"target": {"model": "x"}}})
    defaults = minimal.model_dump(by_alias=True, exclude_none=True, exclude={"deployment"})
    assert written == defaults
    assert list(written) == [name for name in defaults if name in written]  # and in one order


def test_values_yaml_is_short_enough_to_be_read() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    assert len(lines) < 220
    assert max(map(len, lines)) <= 130


def objects(schema: Manifest, node: Any, path: str = "") -> Iterator[tuple[str, Manifest]]:
    """Every object of the schema with its path of keys."""
    if "$ref" in node:
        node = schema["definitions"][node["$ref"].rsplit("/", 1)[1]]
    for branch in node.get("anyOf", []):
        yield from objects(schema, branch, path)
    if "items" in node:
        yield from objects(schema, node["items"], f"{path}[]")
    if node.get("type") == "object":
        yield path, node
        for name, inner in node.get("properties", {}).items():
            yield from objects(schema, inner, f"{path}.{name}".lstrip("."))


def test_every_object_is_closed_but_those_whose_keys_are_the_users() -> None:
    schema = values_schema()
    found = dict(objects(schema, schema))
    assert {path for path, node in found.items() if node.get("additionalProperties") is not False} == set(OPEN)
    assert {"deployment.target", "deployment.speculation", "deployment.hardware"} <= set(found)


@pytest.mark.parametrize("layer", HELMS, ids=[layer.helm for layer in HELMS])
@pytest.mark.parametrize("key", MISSPELT)
def test_a_misspelt_key_is_refused_by_name(key: str, layer: Any) -> None:
    said = refusal(changed("tensorrt-llm-with-a-built-drafter", {key: {}}), layer)
    assert re.search(
        rf"additional propert(y|ies) '?{key.rsplit('.', 1)[-1]}'? (is )?not allowed", said, re.IGNORECASE
    ), said


@pytest.mark.parametrize("layer", HELMS, ids=[layer.helm for layer in HELMS])
@pytest.mark.parametrize("changes", WRONG, ids=[str(changes)[:40] for changes in WRONG])
def test_a_value_of_the_wrong_kind_is_refused(changes: dict[str, object], layer: Any) -> None:
    assert "meet the specifications of the schema" in refusal(changed("sglang", changes), layer)


def test_every_value_is_described() -> None:
    schema = values_schema()
    described = [
        (path, name, "description" in inner or "$ref" in inner)
        for path, node in objects(schema, schema)
        for name, inner in node.get("properties", {}).items()
    ]
    assert len(described) > 180
    assert [f"{path}.{name}" for path, name, is_so in described if not is_so] == []


def test_the_target_cannot_be_forgotten() -> None:
    assert all("target" in refusal({}, layer) for layer in HELMS)


def test_a_parent_chart_may_hold_it() -> None:
    """Helm hands `global` to every subchart."""
    assert refusal(changed("sglang", {"global": {"imageRegistry": "x"}})) == ""


@pytest.mark.parametrize("name", CASES)
def test_the_installations_are_values_by_the_types_too(name: str) -> None:
    Values.model_validate(case(name))


@pytest.mark.parametrize("backend", BACKENDS)
def test_paths_and_metrics_are_those_that_other_renderings_use(backend: str) -> None:
    given = values(
        backend,
        recipe_deployment("qwen3-8b-b200"),
        podMonitor={"enabled": True},
        networkPolicy={"namespaces": ["monitoring"]},
        readiness={"acceptance": False},
    )
    scaled = {"kind": "keda", "prometheusAddress": "http://prometheus:9090"}
    manifests = render({**given, "autoscaling": scaled})
    facts = backend_named(backend).facts
    container = server(manifests)
    assert container["livenessProbe"]["httpGet"]["path"] == facts.probes.live
    assert container["readinessProbe"]["httpGet"]["path"] == facts.probes.ready
    assert only(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["path"] == facts.metrics.path
    query = only(manifests, "ScaledObject")["spec"]["triggers"][0]["metadata"]["query"]
    assert query == f'sum({facts.metrics.queued}{{namespace="serving", app_kubernetes_io_instance="trial"}})'
    hpa = only(render({**given, "autoscaling": {"kind": "hpa"}}), "HorizontalPodAutoscaler")
    assert hpa["spec"]["metrics"][0]["pods"]["metric"]["name"] == facts.metrics.queued
