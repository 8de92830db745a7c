"""`train --dry-run` reports the memory of a real step, and reads only the configuration of the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dflash_serve.checkpoint.target_config import read_target_config
from dflash_serve.cli.main import app
from dflash_serve.models.loader import load_target
from dflash_serve.models.target import TargetModel
from dflash_serve.training import loss
from dflash_serve.training import outlook as module
from dflash_serve.training.outlook import LiveBytes, outlook, outlook_text, step_memory
from dflash_serve.training.recipe import TrainingRecipe, load_recipe
from dflash_serve.training.run import drafter_config, new_drafter
from dflash_serve.training.shards import Example
from dflash_serve.training.trainer import Trainer
from tests.house import ROOT
from tests.support.recipes import tiny_recipe, write_prompts
from tests.unit.tensorrt_llm.published_targets import TARGETS

LENGTH = 200


@pytest.fixture
def recipe(tiny_target_folder: Path, tmp_path: Path) -> TrainingRecipe:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    fields = tiny_recipe(str(tiny_target_folder), prompts, sequences=6, anchors=40).model_dump()
    fields["data"]["answers"] |= {"max_prompt_tokens": LENGTH // 2, "max_new_tokens": LENGTH // 2}
    return TrainingRecipe.model_validate(fields)


def test_live_bytes_are_those_that_are_held_at_once() -> None:
    with LiveBytes() as live:
        a = torch.zeros(100)
        b = a.view(10, 10) + 1  # a view is nothing new
        del a
        c = b.double()
        assert (live.now, live.most) == (400 + 800, 400 + 800)
    assert c.numel() == 100


def test_the_memory_of_a_step_is_that_of_a_real_one(
    tiny_target_folder: Path, recipe: TrainingRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both with attention and logits as on a CPU, and the target's layers as they are before packing."""
    monkeypatch.setattr(module, "ATTENTION", None)
    monkeypatch.setattr(loss, "LOGITS_ON_GPU", 0)
    monkeypatch.setattr(TargetModel, "pack", lambda self: None)
    target = read_target_config(tiny_target_folder)
    config = drafter_config(recipe.drafter, target)
    told, counted, _ = step_memory(recipe, tiny_target_folder, config, 1)
    frozen = load_target(str(tiny_target_folder), dtype=torch.bfloat16)
    tokens = torch.randint(0, 50, (recipe.training.sequences, LENGTH), dtype=torch.int32)
    examples = [Example(index, row, LENGTH // 2) for index, row in enumerate(tokens)]
    trainer = Trainer(recipe, frozen, new_drafter(config, frozen, init="random", seed=0), examples, [], tmp_path)
    trainer.update()
    with LiveBytes() as live:
        trainer.update()
    parameters = sum(parameter.numel() for parameter in trainer.drafter.parameters())
    assert counted == {"target": sum(weight.numel() for weight in frozen.parameters()), "drafter": parameters}
    assert told["drafter"] == pytest.approx(16 * parameters, rel=0.01)
    assert told["step"] + 4 * parameters == pytest.approx(live.most, rel=0.1)  # gradients are of the step there


def test_more_processes_take_less_each(recipe: TrainingRecipe) -> None:
    one, two = outlook(recipe, 1)["memory_bytes"], outlook(recipe, 2)["memory_bytes"]
    assert one["target"] == two["target"]
    assert two["step"] < 0.75 * one["step"]


@pytest.mark.thorough
def test_the_recipe_of_qwen3_8b_fits_eight_b200(tmp_path: Path) -> None:
    found = _published("qwen3-8b", "Qwen/Qwen3-8B", tmp_path, processes=8)
    assert found["target"]["parameters"] == 8_190_735_360
    assert found["drafter"]["target_layer_ids"] == [1, 9, 17, 25, 33]
    assert sum(found["memory_bytes"].values()) < 0.9 * 180e9
    assert found["memory_bytes"]["target"] + found["answers"]["kv_cache_bytes"] < 0.9 * 180e9


def _published(name: str, target: str, folder: Path, *, processes: int) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(TARGETS[target]))
    recipe = load_recipe(ROOT / f"examples/training/{name}.yaml")
    assert recipe.target.model == target
    model = recipe.target.model_copy(update={"model": str(folder)})
    return outlook(recipe.model_copy(update={"target": model}), processes)


@pytest.mark.thorough
def test_the_recipe_of_gpt_oss_20b_fits_eight_b200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    of_20b = {"num_hidden_layers": 24, "num_local_experts": 32, "rope_theta": 150000, "rope_scaling": yarn}
    monkeypatch.setitem(TARGETS, "openai/gpt-oss-20b", {**TARGETS["openai/gpt-oss-120b"], **of_20b})
    found = _published("gpt-oss-20b", "openai/gpt-oss-20b", tmp_path, processes=8)
    assert found["target"]["parameters"] == 20_914_757_184  # OpenAI's model card: 20.9 billion
    assert found["drafter"]["target_layer_ids"] == [1, 6, 11, 16, 21]
    assert sum(found["memory_bytes"].values()) < 0.9 * 180e9
    # At least: 2 operations a weight of the 3.6 billion that a token uses, and 6 a weight of the drafter and a row.
    tokens, rows = 8 * 3072, 8 * 512 * 8
    assert found["step"]["operations"] > 2 * 0.7 * 3.6e9 * tokens + 6 * found["drafter"]["parameters"] * rows
    assert "hours at 900 TFLOP/s" in outlook_text(found)


def test_a_dry_run_tells_and_writes_nothing(recipe: TrainingRecipe, tmp_path: Path) -> None:
    file, output = tmp_path / "recipe.yaml", tmp_path / "out"
    file.write_text(recipe.model_dump_json())
    arguments = ["train", str(file), "--output", str(output), "--dry-run"]
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 0, told.output
    assert "memory of a process: target" in told.output
    assert json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)["answers"]["prompts"] == 20
    assert not output.exists()
