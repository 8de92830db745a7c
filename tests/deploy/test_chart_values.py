"""values.yaml is the one place of a default, and its schema accepts no key that nothing reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_serve.backend import backend as backend_named
from dflash_serve.deploying.chart import ENGINES, generated_files, write_chart
from dflash_serve.deploying.values_schema import values_schema
from dflash_serve.errors import UserError
from tests.support.chart import (
    BACKENDS,
    CHART,
    HELMS,
    Manifest,
    changed,
    only,
    recipe_deployment,
    refusal,
    render,
    server,
    values,
)

GENERATED = generated_files()
SCHEMA = values_schema(CHART / "values.yaml")
OPEN = {
    *("global", "engine.environment", "deployment.engine_args", "resources.extra", "placement.nodeSelector"),
    *("placement.tolerations[]", "extraVolumes[]", "extraVolumeMounts[]", "initContainers[]"),
    *("service.annotations", "serviceAccount.annotations", "podAnnotations", "labels", "podLabels"),
    *("podMonitor.labels", "alerts.labels", "dashboards.labels"),
}
"""Objects whose keys are the user's, Kubernetes' or an engine's."""
MISSPELT = [
    *("replica", "deployment.targets", "deployment.speculation.widht", "image.tag", "models.kinds", "build.image.tag"),
    *("secrets.apiKeys.value", "tests.verify.url"),
]


@pytest.mark.parametrize("name", GENERATED)
def test_generated_files_are_what_the_facts_make(name: str) -> None:
    """After a wanted change: python -m dflash_serve.deploying.chart"""
    assert (CHART / name).read_text() == GENERATED[name]


def test_the_chart_knows_the_backends_whose_drafters_its_probe_can_see_accept() -> None:
    known = yaml.safe_load(GENERATED[ENGINES])
    probe = (CHART / "files" / "ready.py").read_text().rpartition("ASK = {")[2].partition("}")[0]
    assert set(known) == set(BACKENDS) == set(re.findall(r'"([\w-]+)":', probe))


def objects(node: Any, path: str = "") -> Iterator[tuple[str, Manifest]]:
    """Every object of the schema with its path of keys."""
    if "$ref" in node:
        node = SCHEMA["definitions"][node["$ref"].rsplit("/", 1)[1]]
    for branch in node.get("anyOf", []):
        yield from objects(branch, path)
    if "items" in node:
        yield from objects(node["items"], f"{path}[]")
    if node.get("type") == "object":
        yield path, node
        for name, inner in node.get("properties", {}).items():
            yield from objects(inner, f"{path}.{name}".lstrip("."))


def test_every_object_is_closed_but_those_whose_keys_are_the_users() -> None:
    found = dict(objects(SCHEMA))
    assert {path for path, node in found.items() if node.get("additionalProperties") is not False} == OPEN
    assert {"deployment.target", "deployment.speculation", "deployment.hardware", "engine.probes"} <= set(found)


def test_the_schema_has_the_defaults_and_comments_of_values_yaml() -> None:
    sections = SCHEMA["properties"]
    assert sections["replicas"]["default"] == 1
    assert "autoscaling overrules it" in sections["replicas"]["description"]
    assert "hub" in sections["networkPolicy"]["properties"]["egressPorts"]["description"]
    assert sections["models"]["properties"]["download"]["properties"]["enabled"]["type"] == "boolean"
    assert "dflash-serve serve" in sections["deployment"]["description"]
    keys = [inner for section in sections.values() for inner in section.get("properties", {}).values()]
    assert sum("description" in inner for inner in keys) > 50


def test_a_rule_for_a_key_that_is_gone_is_an_error(tmp_path: Path) -> None:
    text = (CHART / "values.yaml").read_text().replace("replicas: 1 #", "copies: 1 #")
    (tmp_path / "values.yaml").write_text(text)
    with pytest.raises(ValueError, match="has no replicas"):
        values_schema(tmp_path / "values.yaml")


@pytest.mark.parametrize("key", MISSPELT)
def test_an_error_names_a_misspelt_key(key: str) -> None:
    for layer in HELMS:
        said = refusal(changed("tensorrt-llm-with-a-built-drafter", {key: {}}), layer)
        last = key.rsplit(".", 1)[-1]
        assert re.search(rf"additional propert(y|ies) '?{last}'? (is )?not allowed", said, re.IGNORECASE), said


def test_the_target_cannot_be_forgotten() -> None:
    assert all("target" in refusal({}, layer) for layer in HELMS)


def test_a_parent_chart_may_hold_it() -> None:
    """Helm hands `global` to every subchart."""
    assert refusal(changed("sglang", {"global": {"imageRegistry": "x"}})) == ""


def test_a_whole_chart_is_not_written_over_something(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name a folder that is not there yet"):
        write_chart(tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_probes_and_metrics_are_the_engines(backend: str) -> None:
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
    assert container["startupProbe"]["httpGet"]["path"] == facts.probes.started
    assert container["livenessProbe"]["httpGet"]["path"] == facts.probes.live
    assert container["readinessProbe"]["httpGet"]["path"] == facts.probes.ready
    assert {"name": "HOME", "value": "/cache"} in container["env"]
    assert facts.environment.items() <= {entry["name"]: entry["value"] for entry in container["env"]}.items()
    assert only(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["path"] == facts.metrics.path
    query = only(manifests, "ScaledObject")["spec"]["triggers"][0]["metadata"]["query"]
    assert query == f'sum({facts.metrics.queued}{{namespace="serving", app_kubernetes_io_instance="trial"}})'
    hpa = only(render({**given, "autoscaling": {"kind": "hpa"}}), "HorizontalPodAutoscaler")
    assert hpa["spec"]["metrics"][0]["pods"]["metric"]["name"] == facts.metrics.queued
