"""Every recipe, on every backend that takes it, becomes the documents that are written down in golden_render/.

After a wanted change: GOLDEN=write pytest tests/deploy/test_render.py, and read the difference.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner, Result

from dflash_serve.backend import server_backend
from dflash_serve.cli.main import app
from dflash_serve.deploying.chart import KNOWN as BACKENDS
from dflash_serve.deployment import load_deployment
from dflash_serve.errors import UserError
from tests.support.offline_hub import offline_hub

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "engines" / "recipes").glob("*.yaml"))
GOLDEN = Path(__file__).parent / "golden_render"
FORMS = {
    "torch": ("helm", "compose", "kserve"),
    "sglang": ("helm", "compose", "kserve", "dynamo"),
    "tensorrt-llm": ("helm", "compose", "kserve", "dynamo"),
    "vllm": ("helm", "compose", "kserve"),
}
NOT_MEANT = {("qwen3-coder-30b-a3b-b200", "torch"), ("qwen3.5-27b-b200", "torch")}
"""The embedded backend has no experts and no recurrent layers; it says so when it prepares."""
KUBERNETES = ("1.32", "1.37")
"""KServe 0.21's oldest, and the newest with published schemas."""


@pytest.fixture(scope="session")
def deployments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Recipe -> a file with its deployment; the hub's models are stand-ins until the session ends."""
    folder = tmp_path_factory.mktemp("deployments")
    with pytest.MonkeyPatch.context() as patch:
        offline_hub(folder / "hub", patch)
        yield {recipe.stem: _written(folder, recipe) for recipe in RECIPES}


def _written(folder: Path, recipe: Path) -> Path:
    path = folder / recipe.name
    path.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text())["deployment"]))
    return path


def takes(name: str, path: Path) -> bool:
    """Whether the backend has nothing against the recipe."""
    try:
        return not server_backend(name).check(load_deployment(path))
    except UserError:  # only the embedded backend finds the bundled target
        return False


def deploy(path: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["deploy", str(path), *words])


def rendered(path: Path, form: str, name: str) -> str:
    result = deploy(path, "--render", form, "--backend", name, "--image", f"registry.example/{name}@sha256:{64 * '0'}")
    assert result.exception is None
    return result.stdout


EACH = pytest.mark.parametrize(
    ("recipe", "name"),
    [(path.stem, name) for path in RECIPES for name in BACKENDS if (path.stem, name) not in NOT_MEANT],
)


@EACH
def test_it_is_what_is_written_down(recipe: str, name: str, deployments: dict[str, Path]) -> None:
    path = deployments[recipe]
    if not takes(name, path):
        result = deploy(path, "--render", "helm", "--backend", name)
        assert isinstance(result.exception, UserError)
        assert not [*GOLDEN.glob(f"{recipe}.{name}.*")]
        return
    for form in FORMS[name]:
        golden, text = GOLDEN / f"{recipe}.{name}.{form}.yaml", rendered(path, form, name)
        if os.environ.get("GOLDEN") == "write":
            golden.parent.mkdir(exist_ok=True)
            golden.write_text(text)
        assert text == golden.read_text(), f"{golden.name}: GOLDEN=write, and read the difference"


def golden(form: str) -> list[Path]:
    return sorted(GOLDEN.glob(f"*.{form}.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("name", BACKENDS)
def test_every_engine_serves_recipes_in_every_form(name: str) -> None:
    written = {path.name.split(".")[-2] for path in GOLDEN.glob(f"*.{name}.*.yaml")}
    assert written == set(FORMS[name])


@pytest.mark.parametrize("path", golden("helm"), ids=lambda path: path.stem)
def test_the_values_hold_the_deployment_itself(path: Path, deployments: dict[str, Path], tmp_path: Path) -> None:
    (values,) = documents(path)
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(values["deployment"]))
    assert load_deployment(again) == load_deployment(deployments[path.name.rsplit(".", 3)[0]])


def test_compose_files_are_valid() -> None:
    """Against the Compose Specification's own schema, which check-jsonschema carries."""
    argv = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        *map(str, golden("compose")),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", golden("compose"), ids=lambda path: path.stem)
def test_a_compose_service_is_locked_up(path: Path) -> None:
    service = documents(path)[0]["services"]["server"]
    assert service["user"] == "10001:10001"
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


@pytest.mark.parametrize("path", golden("compose"), ids=lambda path: path.stem)
def test_a_compose_service_runs_what_a_pod_runs(path: Path) -> None:
    service = documents(path)[0]["services"]["server"]
    (pod,) = pods(path.with_name(path.name.replace(".compose.", ".kserve.")))
    server = pod["containers"][0]
    assert service["entrypoint"] == server["command"]
    variables = {variable["name"]: variable["value"] for variable in server["env"]}
    token = {("HF_TOKEN", None), ("HF_TOKEN_PATH", "/etc/dflash-serve-hub/token")}
    assert service["environment"].items() - token == variables.items() - token
    folders = {volume.split(":")[1] for volume in service["volumes"]} | set(service["tmpfs"])
    emptied = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume} - {"shm"}
    assert folders == {mount["mountPath"] for mount in server["volumeMounts"] if mount["name"] in emptied}


def pods(path: Path) -> Iterator[dict[str, Any]]:
    """Pod specifications in the documents of a golden file."""
    for document in documents(path):
        spec = document.get("spec", {})
        if "predictor" in spec:
            yield {key: value for key, value in spec["predictor"].items() if not key.endswith("Replicas")}
        for component in spec.get("components", []):
            yield component["podTemplate"]["spec"]


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("path", [*golden("kserve"), *golden("dynamo")], ids=lambda path: path.stem)
def test_every_pod_in_it_is_a_pod_to_kubernetes(path: Path, version: str) -> None:
    found = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod} for pod in pods(path)]
    configs = [document for document in documents(path) if document["kind"] == "ConfigMap"]
    assert found
    for document in (*found, *configs):
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("path", [*golden("kserve"), *golden("dynamo")], ids=lambda path: path.stem)
def test_the_deployment_in_the_config_map_is_the_one_that_was_given(
    path: Path, deployments: dict[str, Path], tmp_path: Path
) -> None:
    again = tmp_path / "again.yaml"
    again.write_text(documents(path)[0]["data"]["deployment.yaml"])
    assert load_deployment(again) == load_deployment(deployments[path.name.rsplit(".", 3)[0]])


@pytest.mark.parametrize("path", golden("dynamo"), ids=lambda path: path.stem)
def test_a_graph_has_the_fields_of_dynamos_crd_and_no_other(path: Path) -> None:
    """deploy/operator/api/v1beta1/dynamo{graph,component}deployment_types.go of ai-dynamo/dynamo @006b6e1."""
    graph = documents(path)[1]
    assert (graph["apiVersion"], graph["kind"]) == ("nvidia.com/v1beta1", "DynamoGraphDeployment")
    assert graph["spec"].keys() == {"backendFramework", "components"}
    assert graph["spec"]["backendFramework"] in ("sglang", "vllm", "trtllm")
    known = {"name", "type", "replicas", "runtimeVersionOverride", "podTemplate", "multinode", "sharedMemorySize"}
    for component in graph["spec"]["components"]:
        assert component.keys() <= known
        assert [c["name"] for c in component["podTemplate"]["spec"]["containers"]] == ["main"]


def test_nothing_of_this_machine_is_in_what_is_rendered() -> None:
    texts = [path.read_text() for path in GOLDEN.glob("*.yaml")]
    assert [text for text in texts if str(ROOT) in text or sys.prefix in text or "/tmp/pytest" in text] == []
