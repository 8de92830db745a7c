"""A recipe on each backend, and one on several GPUs: the container runs the command that `serve` would run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from dflash_serve.cli.main import app
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError
from tests.support.chart import BACKENDS, Manifest, config, of_kind, pods, recipe_deployment, render, server, values
from tests.support.offline_hub import offline_hub

CONFIG = "/etc/dflash-serve/deployment.yaml"
TWO_NODES = {
    "target": {"model": "openai/gpt-oss-120b", "quantization": "mxfp4"},
    "drafter": {"model": "z-lab/gpt-oss-120b-DFlash"},
    "parallel": {"tensor": 16, "expert": 16, "nodes": 2},
    "limits": {"max_model_len": 131072, "max_queued_requests": 1048576},  # helm reads numbers as floats
    "hardware": {"gpu": "b300", "count": 16},
    "engine_args": {"sglang": {"stream-interval": 4}},
}

DRAINS = {"torch": ["--drain-seconds", "120"], "vllm": ["--", "--shutdown-timeout", "120"]}
"""Words by which an engine is told how long answers may go on after SIGTERM."""


@pytest.fixture(scope="module", autouse=True)
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        offline_hub(tmp_path_factory.mktemp("hub"), patch)
        yield


def dry_run(arguments: list[str]) -> str:
    """The command that `serve` would become, or the reason why not."""
    done = CliRunner().invoke(app, [*arguments, "--dry-run"])
    if isinstance(done.exception, UserError):
        return f"refused: {done.exception}"
    if done.exit_code == 2:
        return f"refused: {done.stdout}"
    assert done.exception is None, done.output
    return done.stdout


def check_command(manifests: list[Manifest], deployment: Manifest, backend: str, folder: Path) -> str:
    """The ConfigMap's document is the deployment, and the container's own arguments give the same command."""
    mounted, original = folder / "mounted.yaml", folder / "original.yaml"
    mounted.write_text(config(manifests)["deployment.yaml"])
    original.write_text(yaml.safe_dump(deployment))
    assert Deployment.model_validate(yaml.safe_load(mounted.read_text())) == Deployment.model_validate(deployment)
    container = server(manifests)
    assert container["command"] == ["dflash-serve"]
    served = ["serve", str(original), "--backend", backend, "--host", "0.0.0.0", "--port", "8000"]
    served += ["--folder", "/prepared", *DRAINS.get(backend, [])]
    wanted = dry_run(served)
    assert dry_run([str(mounted) if word == CONFIG else word for word in container["args"]]) == wanted
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == (
        deployment["hardware"]["count"] // deployment.get("parallel", {}).get("nodes", 1)
    )
    return wanted


@pytest.mark.parametrize(
    ("recipe", "backend"), [*(("qwen3-8b-b200", name) for name in BACKENDS), ("gpt-oss-120b-b300", "tensorrt-llm")]
)
def test_the_container_runs_what_serve_runs_for_the_recipe(recipe: str, backend: str, tmp_path: Path) -> None:
    deployment = recipe_deployment(recipe)
    check_command(render(values(backend, deployment)), deployment, backend, tmp_path)


def test_each_node_of_several_runs_its_own_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """LeaderWorkerSet's three variables are all that differs."""
    manifests = render(values("sglang", TWO_NODES))
    commands = []
    for rank in ("0", "1"):
        for name, value in (("LEADER_ADDRESS", "trial-0.trial"), ("GROUP_SIZE", "2"), ("WORKER_INDEX", rank)):
            monkeypatch.setenv(f"LWS_{name}", value)
        commands.append(check_command(manifests, TWO_NODES, "sglang", tmp_path))
    for number, command in enumerate(commands):
        assert f"--nnodes 2 --node-rank {number} --dist-init-addr trial-0.trial:20000" in command
        assert "--stream-interval 4" in command
    templates = [pod["spec"]["containers"][0]["args"] for name, pod in pods(manifests) if "LeaderWorkerSet" in name]
    assert len(templates) == 2
    assert templates[0] == templates[1]


def test_custom_resources_are_rendered_only_where_they_are_asked_for() -> None:
    """The default installs on a bare cluster."""
    kinds = {manifest["kind"] for manifest in render(values("sglang", recipe_deployment("qwen3-8b-b200")))}
    assert kinds == {
        *("ConfigMap", "Deployment", "NetworkPolicy", "Pod", "PodDisruptionBudget", "Service", "ServiceAccount"),
    }
    assert of_kind(render(values("sglang", TWO_NODES)), "LeaderWorkerSet")
