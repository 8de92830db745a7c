"""examples/deploy: Docker Compose, KServe and Dynamo run what the pod of the chart runs; their schemas accept them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from dflash_serve.cli.main import app
from dflash_serve.deployment.layers import load_deployment
from tests.support.chart import ROOT, render, server_pod, values
from tests.support.offline_hub import offline_hub

jsonschema: Any = import_module("jsonschema")
EXAMPLES = ROOT / "examples" / "deploy"
DEPLOYMENT = ROOT / "examples" / "deployments" / "sglang.yaml"
KUBERNETES = "1.37"
"""The newest with published schemas."""
TOKEN = {"HF_TOKEN", "HF_TOKEN_PATH"}
TEXT, EMPTY = {"type": "string"}, {"type": "object", "additionalProperties": False}
LLM_INFERENCE_SERVICE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "serving.kserve.io/v1alpha2"},
        "kind": {"const": "LLMInferenceService"},
        "metadata": {"type": "object"},
        "spec": {
            **EMPTY,
            "properties": {
                "model": {**EMPTY, "required": ["uri"], "properties": {"name": TEXT, "uri": TEXT}},
                "storageInitializer": {**EMPTY, "properties": {"enabled": {"type": "boolean"}}},
                "replicas": {"type": "integer"},
                "labels": {"type": "object", "additionalProperties": TEXT},
                "router": {**EMPTY, "properties": {"gateway": EMPTY, "route": EMPTY, "scheduler": EMPTY}},
                "template": {"type": "object"},  # checked by Kubernetes' own schemas
            },
        },
    },
}
"""Fields that we write, as kserve @aaac4e2 has them (config/crd/full/llmisvc)."""
KSERVES_CACHE = {"HF_HUB_CACHE": "/models/huggingface/hub"}
"""A variable that KServe's template for an LLMInferenceService sets to another folder."""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()))


def service() -> dict[str, Any]:
    found: dict[str, Any] = documents("compose")[0]["services"]["server"]
    return found


def predictor() -> dict[str, Any]:
    found: dict[str, Any] = documents("kserve")[1]["spec"]["predictor"]
    return {key: value for key, value in found.items() if not key.endswith("Replicas")}


def template() -> dict[str, Any]:
    found: dict[str, Any] = documents("kserve-llm")[1]["spec"]["template"]
    return found


def worker() -> dict[str, Any]:
    found: dict[str, Any] = documents("dynamo")[1]["spec"]["components"][1]["podTemplate"]["spec"]
    return found


@pytest.fixture(scope="module")
def chart() -> dict[str, Any]:
    """The pod of the chart for the same deployment."""
    given = values("sglang", yaml.safe_load(DEPLOYMENT.read_text()), startup={"gigabytes": 19})
    pod: dict[str, Any] = server_pod(render({**given, "readiness": {"acceptance": False}}))["spec"]
    return pod


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"] if entry["name"] not in TOKEN}


def writable(container: dict[str, Any]) -> set[str]:
    return {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}


@pytest.mark.parametrize("name", ["compose", "kserve", "kserve-llm", "dynamo"])
def test_it_serves_the_example_deployment(name: str, tmp_path: Path) -> None:
    first = documents(name)[0]
    text = first["configs"]["deployment"]["content"] if name == "compose" else first["data"]["deployment.yaml"]
    (tmp_path / "deployment.yaml").write_text(text)
    assert load_deployment(tmp_path / "deployment.yaml") == load_deployment(DEPLOYMENT)


def test_the_compose_file_is_valid() -> None:
    """Against the Compose Specification's own schema, which check-jsonschema carries."""
    argv = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*argv, EXAMPLES / "compose.yaml"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_compose_service_runs_what_the_chart_runs(chart: dict[str, Any]) -> None:
    found, (wanted,) = service(), chart["containers"]
    assert found["entrypoint"] == wanted["command"] + wanted["args"]
    assert {name: text for name, text in found["environment"].items() if name not in TOKEN} == variables(wanted)
    (scratch, options) = found["tmpfs"][0].split(":")
    assert options == "exec"  # Docker's default is noexec, an emptyDir's is not
    folders = {volume.split(":")[1] for volume in found["volumes"]} | {scratch}
    assert folders == writable(wanted) - {"/dev/shm"}
    assert wanted["readinessProbe"]["httpGet"]["path"] in found["healthcheck"]["test"][3]
    assert (found["user"], found["read_only"], found["cap_drop"]) == ("10001:10001", True, ["ALL"])
    assert all(port.startswith("127.0.0.1:") for port in found["ports"])


@pytest.mark.parametrize("name", ["kserve", "kserve-llm"])
def test_kserve_runs_what_the_chart_runs(name: str, chart: dict[str, Any]) -> None:
    pod = predictor() if name == "kserve" else template()
    (found,), (wanted,) = pod["containers"], chart["containers"]
    assert found["command"] == wanted["command"] + wanted["args"]
    assert variables(found) == {**variables(wanted), **(KSERVES_CACHE if name == "kserve-llm" else {})}
    assert writable(found) == writable(wanted)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert {**found[probe], "httpGet": found[probe]["httpGet"]["path"]} == {
            **wanted[probe],
            "httpGet": wanted[probe]["httpGet"]["path"],
        }
    assert found["securityContext"] == wanted["securityContext"]
    for key in ("securityContext", "terminationGracePeriodSeconds", "automountServiceAccountToken"):
        assert pod[key] == chart[key]


def test_dynamo_gets_the_engines_own_words_but_those_for_listening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline_hub(tmp_path, monkeypatch)
    argv = ["serve", str(DEPLOYMENT), "--backend", "sglang", "--dry-run", "--quiet", "--folder", "/prepared"]
    words = shlex.split(CliRunner().invoke(app, argv).stdout)
    start = words.index("sglang.launch_server")
    wanted = words[start + 1 :]
    for flag in ("--host", "--port"):
        del wanted[wanted.index(flag) : wanted.index(flag) + 2]
    (container,) = worker()["containers"]
    assert container["args"][:-2] == [*wanted, "--served-model-name", "Qwen/Qwen3-8B"]
    assert container["args"][-2] == "--kv-events-config"  # for Dynamo's router; tests/sglang/test_dynamo.py parses it
    told = [f"{name}={value}" for name, value in variables(container).items()]
    assert [word for word in words[:start] if word.startswith("DFLASH_SERVE") and word not in told] == []
    (preparing,) = worker()["initContainers"]
    assert "--prepare" in preparing["command"]


def test_the_graph_has_the_fields_of_dynamos_crd_and_no_other() -> None:
    """deploy/operator/api/v1beta1/dynamo{graph,component}deployment_types.go of ai-dynamo/dynamo @006b6e1."""
    graph = documents("dynamo")[1]
    assert (graph["apiVersion"], graph["kind"]) == ("nvidia.com/v1beta1", "DynamoGraphDeployment")
    assert graph["spec"].keys() == {"backendFramework", "components"}
    known = {"name", "type", "replicas", "runtimeVersionOverride", "podTemplate", "multinode", "sharedMemorySize"}
    for component in graph["spec"]["components"]:
        assert component.keys() <= known
        assert [c["name"] for c in component["podTemplate"]["spec"]["containers"]] == ["main"]


def test_the_llm_inference_service_has_the_fields_of_kserves_crd_and_no_other() -> None:
    """KServe merges the pod with its own template, whose container is `main`."""
    jsonschema.validate(documents("kserve-llm")[1], LLM_INFERENCE_SERVICE)
    assert not [label for label in documents("kserve-llm")[1]["spec"]["labels"] if label.startswith("app.")], (
        "its selector"
    )
    (container,) = template()["containers"]
    assert container["name"] == "main"
    assert "lifecycle" not in container, "KServe's has an exec, and Kubernetes takes one handler"


@pytest.mark.parametrize("name", ["kserve", "kserve-llm", "dynamo"])
def test_every_pod_in_it_is_a_pod_to_kubernetes(name: str) -> None:
    spec = {"kserve": predictor, "kserve-llm": template, "dynamo": worker}[name]()
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
    for document in (pod, documents(name)[0]):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
