"""`deploy --render dynamo`: the graph has fields of Dynamo's definition alone, and the engine's own words."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from dflash_serve.cli.main import app
from dflash_serve.deployment.description import Deployment
from tests.support.chart import DIGEST, ROOT, check_golden
from tests.support.offline_hub import offline_hub
from tests.support.paper_models import write_paper_drafter, write_paper_target

jsonschema: Any = import_module("jsonschema")
IMAGE = f"registry.example/x@{DIGEST}"
KUBERNETES = "1.37"
POD = {"type": "object"}  # checked by Kubernetes' own schemas
COMPONENT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?$", "maxLength": 63},
        "type": {"enum": ["frontend", "worker", "prefill", "decode"]},
        "replicas": {"type": "integer", "minimum": 0},
        "runtimeVersionOverride": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
        "sharedMemorySize": {"type": "string"},
        "multinode": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"nodeCount": {"type": "integer", "minimum": 2}},
        },
        "podTemplate": {"type": "object", "additionalProperties": False, "properties": {"spec": POD}},
    },
}
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "nvidia.com/v1beta1"},
        "kind": {"const": "DynamoGraphDeployment"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "backendFramework": {"enum": ["sglang", "vllm", "trtllm"]},
                "components": {"type": "array", "items": COMPONENT},
            },
        },
    },
}
"""Fields that we write, as deploy/operator/api/v1beta1 of ai-dynamo/dynamo @006b6e1 has them."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    target, drafter = write_paper_target(folder / "target"), write_paper_drafter(folder / "drafter")
    return {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}}


def asked(file: Path, backend: str) -> Any:
    words = ["deploy", str(file), "--backend", backend, "--render", "dynamo", "--name", "mine", "--image", IMAGE, "-q"]
    return CliRunner().invoke(app, words)


def rendered(fields: dict[str, Any], backend: str, folder: Path) -> tuple[Deployment, dict[str, Any]]:
    """The deployment in the ConfigMap, and the components by their names."""
    file = folder / "deployment.yaml"
    file.write_text(yaml.safe_dump(fields))
    result = asked(file, backend)
    assert result.exception is None, result.exception
    config, graph = yaml.safe_load_all(result.stdout)
    jsonschema.validate(graph, SCHEMA)
    kubernetes_validate.validate(config, KUBERNETES, strict=True)
    components = {one["name"]: one for one in graph["spec"]["components"]}
    for one in components.values():
        spec = one["podTemplate"]["spec"]
        if one["type"] != "frontend":
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        (container,) = spec["containers"]
        assert (container["name"], container["image"]) == ("main", IMAGE)
    return Deployment.model_validate(yaml.safe_load(config["data"]["deployment.yaml"])), components


def words_of(component: dict[str, Any]) -> list[str]:
    found: list[str] = component["podTemplate"]["spec"]["containers"][0]["args"]
    return found


def test_the_examples_worker_is_what_is_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline_hub(tmp_path, monkeypatch)
    result = asked(ROOT / "examples" / "deployments" / "sglang.yaml", "sglang")
    assert result.exception is None, result.exception
    graph = list(yaml.safe_load_all(result.stdout))[1]
    example = list(yaml.safe_load_all((ROOT / "examples" / "deploy" / "dynamo.yaml").read_text()))[1]
    ours, theirs = (one["spec"]["components"] for one in (graph, example))
    assert words_of(ours[1]) == words_of(theirs[1])
    for component in (0, 1):
        (mine,), (example_s,) = (one[component]["podTemplate"]["spec"]["containers"] for one in (ours, theirs))
        assert {entry["name"]: entry["value"] for entry in mine["env"]} == {
            entry["name"]: entry["value"] for entry in example_s["env"]
        }
        assert mine.get("volumeMounts") == example_s.get("volumeMounts")
        assert mine.get("securityContext") == example_s.get("securityContext")


def test_the_graph_of_a_pair_is_this(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline_hub(tmp_path, monkeypatch)
    fields = yaml.safe_load((ROOT / "examples" / "deployments" / "sglang.yaml").read_text())
    file = tmp_path / "deployment.yaml"
    file.write_text(yaml.safe_dump({**fields, "pair": {"transfer": "nixl", "decode": {"replicas": 2}}}))
    result = asked(file, "sglang")
    assert result.exception is None, result.exception
    check_golden("sglang-pair.graph", list(yaml.safe_load_all(result.stdout)))


def test_sglangs_pair_is_two_components_and_several_nodes_are_dynamos(models: dict[str, Any], tmp_path: Path) -> None:
    pair = {"transfer": "nixl", "prefill": {"replicas": 2}, "decode": {"gpus": 16, "nodes": 2}}
    target = write_paper_target(tmp_path / "wide", num_key_value_heads=16)
    drafter = write_paper_drafter(tmp_path / "drafter", num_key_value_heads=16, num_attention_heads=16)
    fields = {
        "target": {"model": str(target)},
        "drafter": {"model": str(drafter)},
        "hardware": {"gpu": "b200", "count": 8},
        "parallel": {"tensor": 8},
        "pair": pair,
    }
    described, components = rendered(fields, "sglang", tmp_path)
    assert described.pair is not None
    assert components.keys() == {"frontend", "prefill", "decode"}
    for role, replicas, tensor, nodes in (("prefill", 2, "8", None), ("decode", 1, "16", {"nodeCount": 2})):
        one = components[role]
        words = words_of(one)
        assert (one["type"], one["replicas"], one.get("multinode")) == (role, replicas, nodes)
        assert words[words.index("--disaggregation-mode") + 1] == role
        assert words[words.index("--disaggregation-transfer-backend") + 1] == "nixl"
        assert words[words.index("--tp-size") + 1] == tensor
        assert ("--host" in words) == (role == "prefill"), "the decode half asks the prefill half at its pod's address"
        assert not {"--port", "--nnodes", "--node-rank", "--dist-init-addr"} & {*words}
        limits = one["podTemplate"]["spec"]["containers"][0]["resources"]["limits"]
        assert limits == {"nvidia.com/gpu": "8"}
        assert ("--kv-events-config" in words) == (role == "prefill")


def test_vllms_halves_know_their_address_and_draft_from_one_path(models: dict[str, Any], tmp_path: Path) -> None:
    _, components = rendered({**models, "hardware": {"gpu": "b200"}, "pair": {}}, "vllm", tmp_path)
    drafters = set()
    for role in ("prefill", "decode"):
        container = components[role]["podTemplate"]["spec"]["containers"][0]
        words, named = container["args"], {entry["name"]: entry for entry in container["env"]}
        assert container["command"] == ["python3", "-m", "dynamo.vllm"]
        assert words[:2] == ["--model", models["target"]["model"]]
        assert words[words.index("--disaggregation-mode") + 1] == role
        address = named["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert address == "status.podIP"
        drafters.add(words[words.index("--speculative-config") + 1])
    assert len(drafters) == 1


def test_tensorrt_llm_reads_its_file_by_dynamos_own_flag(models: dict[str, Any], tmp_path: Path) -> None:
    fields = {"target": models["target"], "hardware": {"gpu": "b200"}}
    _, components = rendered(fields, "tensorrt-llm", tmp_path)
    words = words_of(components["worker"])
    assert words[:2] == ["--model-path", models["target"]["model"]]
    assert words[words.index("--extra-engine-args") + 1].startswith("/prepared/")


@pytest.mark.parametrize(
    ("backend", "more", "line"),
    [
        ("torch", {}, "--backend: Dynamo has no worker for torch"),
        ("sglang", {"serving": {"reasoning_parser": "qwen3"}}, "serving.reasoning_parser: Dynamo's frontend parses"),
        ("tensorrt-llm", {"pair": {}}, "the decoding server never sees the prompt"),
    ],
)
def test_what_dynamo_would_not_take_is_refused(
    backend: str, more: dict[str, Any], line: str, models: dict[str, Any], tmp_path: Path
) -> None:
    fields = {**models, **more} if backend != "torch" else {"target": {"model": "smollm2"}}
    (tmp_path / "deployment.yaml").write_text(yaml.safe_dump(fields))
    assert line in str(asked(tmp_path / "deployment.yaml", backend).exception)
