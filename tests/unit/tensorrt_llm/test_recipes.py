"""Every recipe becomes the configuration and the command line that are written down beside this file.

After a wanted change: GOLDEN=write pytest tests/unit/tensorrt_llm/test_recipes.py, and read the difference.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dflash_serve.deployment import Deployment
from dflash_tensorrt_llm import TensorRTLLMBackend
from dflash_tensorrt_llm.launch_plan import make_launch_plan
from dflash_tensorrt_llm.upstream import Release
from tests.unit.tensorrt_llm.conftest import RECIPES

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
FOLDER = Path("/prepared")


def rendered(deployment: Deployment, release: str) -> str:
    backend = TensorRTLLMBackend(Release.parse(release))
    command = backend.command(deployment, FOLDER, host="0.0.0.0", port=8000)
    environment = "".join(f"{name}={value} " for name, value in command.env.items())
    text = backend.yaml(make_launch_plan(deployment, backend.release), FOLDER)
    return f"# {environment}{shlex.join(command.argv)}\n{text}"


def test_there_is_a_recipe_for_every_promised_machine() -> None:
    assert set(NAMES) >= {
        "gpt-oss-120b-b300", "gpt-oss-120b-b200", "qwen3-8b-b200", "qwen3-8b-h200", "llama-3.1-8b-b200",
        "llama-3.1-8b-h200", "qwen3-coder-30b-a3b-b200", "kimi-k2.5-b300", "smollm2",
    }  # fmt: skip


@pytest.mark.parametrize("release", ["1.3.0rc27", "1.4"])
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_no_problems(name: str, release: str, hub: Path, recipe: Callable[[str], Deployment]) -> None:
    assert TensorRTLLMBackend(Release.parse(release)).check(recipe(name)) == []


@pytest.mark.parametrize("release", ["1.3.0rc27", "1.4"])
@pytest.mark.parametrize("name", NAMES)
def test_configuration_and_command_are_the_golden_ones(
    name: str, release: str, hub: Path, recipe: Callable[[str], Deployment]
) -> None:
    path = GOLDEN / f"{name}.trtllm-{release}.yaml"
    text = rendered(recipe(name), release)
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def test_k_is_b_minus_one_and_never_b(hub: Path, recipe: Callable[[str], Deployment]) -> None:
    text = rendered(recipe("gpt-oss-120b-b300"), "1.4")
    assert yaml.safe_load(text)["speculative_config"]["max_draft_len"] == 9


def test_two_nodes_are_started_by_srun(hub: Path, recipe: Callable[[str], Deployment]) -> None:
    base = recipe("gpt-oss-120b-b200")
    parallel = base.parallel.model_copy(update={"tensor": 16, "expert": 16, "nodes": 2, "attention_data": True})
    hardware = base.hardware.model_copy(update={"count": 16})
    wide = base.model_copy(update={"parallel": parallel, "hardware": hardware})
    backend = TensorRTLLMBackend(Release.parse("1.4"))
    assert backend.check(wide) == []
    argv = backend.command(wide, FOLDER).argv
    assert argv[:6] == ("srun", "--mpi=pmix", "--nodes=2", "--ntasks=16", "--ntasks-per-node=8", "trtllm-llmapi-launch")
    assert yaml.safe_load(rendered(wide, "1.4"))["gpus_per_node"] == 8
