"""Every recipe becomes a configuration that its release takes; the values of all are written down beside this file.

After a wanted change: GOLDEN=write pytest tests/unit/tensorrt_llm/test_recipes.py, and read the difference.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_serve.deployment.description import Deployment
from dflash_tensorrt_llm.engine_arguments import OTHER_CONFIG
from dflash_tensorrt_llm.upstream import LlmArgs
from tests.support.engine_readers import tensorrt_llm_quantization
from tests.unit.tensorrt_llm.conftest import PREPARED, RECIPES, backend, changed, configuration
from tests.unit.tensorrt_llm.published_targets import TARGETS

GOLDEN = Path(__file__).parent / "golden" / "recipes.txt"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml") if path.stem != "smollm2")  # that one is for a CPU
RELEASES = ["1.3.0rc27", "1.4"]
SERVED = [(name, release) for name in NAMES for release in RELEASES if release == "1.4" or "-d" not in name]
"""DSpark and DFlash2 came with 1.4."""
pytestmark = pytest.mark.usefixtures("hub")


def test_there_is_a_recipe_for_every_promised_machine() -> None:
    assert set(NAMES) >= {
        "gpt-oss-120b-b300", "gpt-oss-120b-b200", "qwen3-8b-b200", "qwen3-8b-h200", "llama-3.1-8b-b200",
        "llama-3.1-8b-h200", "qwen3-coder-30b-a3b-b200", "kimi-k2.5-b300", "kimi-k2.5-b200",
        "qwen3.5-27b-b200", "qwen3-8b-dspark-b200", "qwen3.8-27b-dflash2-b200",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "release"), SERVED)
def test_every_value_of_a_recipes_configuration_is_one_that_its_release_takes(
    name: str, release: str, recipe: Callable[[str], Deployment]
) -> None:
    """Literals, ranges and keys, forbidden extras at every depth; K is B - 1 and never B."""
    fields = configuration(recipe(name), release)
    ours = {key: value for key, value in fields.items() if key in LlmArgs.model_fields}
    assert fields.keys() - ours.keys() <= set(OTHER_CONFIG)
    assert LlmArgs.model_validate(ours).model_dump(exclude_unset=True, mode="json") == ours
    assert ours["speculative_config"]["max_draft_len"] == backend(release).launch(recipe(name)).block_size - 1


def row(deployment: Deployment, release: str) -> str:
    """Command and configuration by value, or the reason of a refusal."""
    if problems := backend(release).launch(deployment).problems:
        return f"refused: {problems[0].what}"
    command = backend(release).launch(deployment).command(PREPARED)
    return f"{shlex.join(command.argv)} | {json.dumps(configuration(deployment, release))}"


def test_configurations_and_commands_are_the_golden_ones(recipe: Callable[[str], Deployment]) -> None:
    text = "".join(f"{name} {release} | {row(recipe(name), release)}\n" for name in NAMES for release in RELEASES)
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_two_nodes_are_started_by_srun(recipe: Callable[[str], Deployment]) -> None:
    parallel = {"tensor": 16, "expert": 16, "nodes": 2, "attention_data": True}
    wide = changed(recipe("gpt-oss-120b-b200"), parallel=parallel, hardware={"count": 16})
    assert configuration(wide)["gpus_per_node"] == 8
    argv = backend().launch(wide).command(PREPARED).argv
    assert argv[:6] == ("srun", "--mpi=pmix", "--nodes=2", "--ntasks=16", "--ntasks-per-node=8", "trtllm-llmapi-launch")


@pytest.mark.parametrize("name", NAMES)
def test_a_recipes_target_is_one_that_upstreams_quantisation_reader_reads(
    name: str, recipe: Callable[[str], Deployment]
) -> None:
    target = recipe(name).target
    asked = {"fp8": "FP8", "nvfp4": "NVFP4", "mxfp4": "W4A8_MXFP4_MXFP8"}.get(target.quantization)
    assert tensorrt_llm_quantization(TARGETS[target.model]) == asked


def test_kimis_own_weights_are_not() -> None:
    """So its recipe names NVIDIA's NVFP4."""
    with pytest.raises(TypeError):
        tensorrt_llm_quantization(TARGETS["moonshotai/Kimi-K2.5"])
