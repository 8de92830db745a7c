"""Every recipe becomes a configuration that its release takes; one of them is written down beside this file.

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
from dflash_tensorrt_llm.engine_arguments import OTHER_CONFIG
from dflash_tensorrt_llm.releases import Release
from dflash_tensorrt_llm.upstream import LlmArgs, llm_args
from tests.support.engine_readers import tensorrt_llm_quantization
from tests.unit.tensorrt_llm.conftest import RECIPES
from tests.unit.tensorrt_llm.published_targets import TARGETS

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
FOLDER = Path("/prepared")


def rendered(deployment: Deployment, release: str) -> str:
    backend = TensorRTLLMBackend(Release.parse(release))
    command = backend.command(deployment, FOLDER, host="0.0.0.0", port=8000)
    environment = "".join(f"{name}={value} " for name, value in command.env.items())
    text = backend.yaml(backend.resolve(deployment), FOLDER)
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
def test_configuration_and_command_are_the_golden_ones(
    release: str, hub: Path, recipe: Callable[[str], Deployment]
) -> None:
    path = GOLDEN / f"qwen3-8b-b200.trtllm-{release}.yaml"
    text = rendered(recipe("qwen3-8b-b200"), release)
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


@pytest.mark.parametrize("release", ["1.3.0rc27", "1.4"])
@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_a_recipes_configuration_is_one_that_its_release_takes(
    name: str, release: str, hub: Path, recipe: Callable[[str], Deployment]
) -> None:
    """Literals, ranges and keys, forbidden extras at every depth: read back as the release would read it."""
    fields = yaml.safe_load(rendered(recipe(name), release))
    ours = {key: value for key, value in fields.items() if key in LlmArgs.model_fields}
    assert fields.keys() - ours.keys() <= set(OTHER_CONFIG)
    read = Release.parse(release)
    assert yaml.safe_load(yaml.safe_dump(llm_args(ours, read).yaml_fields())) == ours
    assert ours["speculative_config"]["attention_backend"] in read.attention_backends


@pytest.mark.parametrize("name", NAMES)
def test_a_recipes_target_is_one_that_upstreams_quantisation_reader_reads(
    name: str, recipe: Callable[[str], Deployment]
) -> None:
    target = recipe(name).target
    asked = {"fp8": "FP8", "nvfp4": "NVFP4", "mxfp4": "W4A8_MXFP4_MXFP8"}.get(target.quantization)
    assert tensorrt_llm_quantization(TARGETS[target.model]) == asked


def test_kimis_own_weights_are_not() -> None:
    """Why its recipe names NVIDIA's NVFP4."""
    with pytest.raises(TypeError):
        tensorrt_llm_quantization(TARGETS["moonshotai/Kimi-K2.5"])
