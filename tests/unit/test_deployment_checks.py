"""What every engine's adapter asks first: does the drafter fill such blocks, and are built files what was built?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_serve.adapter.checks import block_problems, changed_files, layer_problems
from dflash_serve.adapter.launch import EngineLaunch
from dflash_serve.adapter.registry import server_backend
from dflash_serve.deployment.description import Deployment
from tests.support.built import flip_last_byte, seal
from tests.support.paper_models import write_paper_drafter, write_paper_target
from tests.support.tiny import tiny_drafter_config
from tests.unit.tensorrt_llm.published_targets import TARGETS


@pytest.fixture
def built(tmp_path: Path) -> Deployment:
    target, drafter = write_paper_target(tmp_path / "target"), write_paper_drafter(tmp_path / "drafter")
    models = {"target": {"model": str(seal(target))}, "drafter": {"model": str(seal(drafter))}}
    return Deployment.model_validate({**models, "hardware": {"gpu": "h200"}})


def test_a_drafter_that_is_not_used_is_not_read(built: Deployment, tmp_path: Path) -> None:
    flip_last_byte(tmp_path / "drafter" / "model.safetensors")
    assert len(changed_files(built)) == 1
    plain = Deployment.model_validate({**built.model_dump(), "speculation": {"width": "off"}})
    assert changed_files(plain) == []


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        ({}, ""),
        ({"block_size": 4, "width": 4}, ""),
        ({"block_size": 8}, "block_size 8 is larger than the drafter's 4"),
        ({"width": 5}, "width 5 is larger than the block of 4 slots"),
        ({"block_size": 2, "width": 3}, "width 3 is larger than the block of 2 slots"),
    ],
)
def test_no_block_or_width_beyond_the_drafter(speculation: dict[str, int], message: str) -> None:
    deployment = Deployment.model_validate({"target": {"model": "t"}, "speculation": speculation})
    found = [problem.what for problem in block_problems(deployment, tiny_drafter_config())]
    assert found == ([message] if message else [])


@pytest.mark.parametrize(
    ("ids", "message"), [((1, 3, 5), ""), ((3, 1, 5), "[3, 1, 5] are not in order"), ((1, 3, 3), "name a layer twice")]
)
def test_layers_that_an_engine_was_given_in_another_order_are_a_problem(ids: tuple[int, ...], message: str) -> None:
    """Inside an engine that was started without `serve`, which puts them in order."""
    found = "".join(problem.what for problem in layer_problems(tiny_drafter_config(target_layer_ids=ids), "SGLang"))
    assert message in found
    assert bool(found) == bool(message)


def test_memory_is_counted_for_the_keys_and_values_that_the_checkpoint_requests(tmp_path: Path) -> None:
    """Llama-3.1-8B at 131072 positions: 8.6 GB of K/V in FP8, as `plan` has it, and 17.2 GB in bf16."""
    sizes, backend = TARGETS["meta-llama/Llama-3.1-8B-Instruct"], server_backend("sglang")
    recipe = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "quantization_config": recipe}))
    given = {"target": {"model": str(tmp_path)}, "hardware": {"gpu": "h100"}}
    launch = backend.launch(Deployment.model_validate(given))
    assert isinstance(launch, EngineLaunch)
    assert launch.memory is not None
    assert launch.memory.token == 2 * 32 * 8 * 128
