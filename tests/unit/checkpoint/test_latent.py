"""Drafters with latent attention (MLA): read as they are published, and given to the engine that has their class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dflash_serve.adapter.registry import backend
from dflash_serve.adapter.verdicts import checkpoint_verdict
from dflash_serve.checkpoint.config import DrafterConfig, context_bytes, weight_bytes
from dflash_serve.checkpoint.reader import DIALECTS, open_checkpoint, parse
from dflash_serve.cli.main import app
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError
from dflash_serve.models.drafter import Drafter
from dflash_sglang import SGLangBackend
from dflash_vllm import VLLMBackend
from tests.support.latent import BLOCK_SIZE, write_latent_drafter
from tests.support.tiny import edit_json
from tests.support.tiny_target import write_tiny_target
from tests.unit.checkpoint.published_heads import KIMI_DSPARK

LATENT = DIALECTS["k3-dspark"]


def read(**changes: Any) -> tuple[DrafterConfig | None, list[str]]:
    problems: list[Any] = []
    config, _ = parse({**KIMI_DSPARK, **changes}, Path("config.json"), problems, block_size=8)
    return config, [problem.what for problem in problems]


def deployed(folder: Path, **more: Any) -> Deployment:
    target = write_tiny_target(folder / "target", family="qwen3", positions=512)
    write_latent_drafter(folder / "drafter", json.loads((target / "config.json").read_text())["vocab_size"])
    models = {"target": {"model": str(target)}, "drafter": {"model": str(folder / "drafter")}}
    return Deployment.model_validate({**models, "speculation": {"block_size": BLOCK_SIZE}, **more})


def test_kimis_drafter_is_read_with_its_sizes() -> None:
    """Bytes: of the published file without its embedding, and TensorRT-LLM's measured K/V of a token (#19040)."""
    config, found = read()
    assert found == []
    assert config is not None
    assert (weight_bytes(config), context_bytes(config)) == (4_775_815_682, 5760)
    assert (config.block_size, config.slots, config.rows(), config.num_target_layers) == (8, "anchor-first", 7, 93)
    assert (
        config.words == "vanilla Markov head of rank 256, confidence head, latent attention (MLA), anchor-first slots"
    )
    assert (config.rope.scaling, config.rope.factor, config.head_dim) == ("yarn", 32.0, 192)
    assert [config.kv_split(devices) for devices in (1, 8)] == [1, 1]
    again, dialect = parse(LATENT.write(config, None), Path("config.json"), [])
    assert (again, dialect) == (config, LATENT)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"mla_use_output_gate": True}, "mla_use_output_gate = True"),
        ({"dspark_bonus_anchor": True}, "dspark_bonus_anchor = True"),
        ({"n_routed_experts": 8}, "n_routed_experts = 8: experts in a drafter"),
        ({"target_hidden_size": 4096}, "target_hidden_size = 4096: hidden_size is 7168"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size = 32000: vocab_size is 163840"),
        ({"num_target_layers": 93}, "num_target_layers = 93: target_layer_ids names 5 layers"),
        ({"q_lora_rank": None}, "no q_lora_rank"),
        ({"sliding_window": 2048}, "unknown key sliding_window = 2048"),
        ({"target_layer_ids": None, "num_target_layers": None}, "no target_layer_ids"),
        ({"target_num_hidden_layers": 60}, "name layer 89, but the target has layers 0..59"),
    ],
)
def test_what_its_class_has_not_is_named(changes: dict[str, Any], what: str) -> None:
    config, found = read(**changes)
    assert config is None
    assert what in "\n".join(found)


def test_a_missing_block_size_is_asked_of_the_deployment(tmp_path: Path) -> None:
    write_latent_drafter(tmp_path / "drafter")
    checkpoint = open_checkpoint(tmp_path / "drafter")
    assert [problem.what for problem in checkpoint.problems] == ["no block_size"]
    assert "set speculation.block_size (--block-size)" in checkpoint.problems[0].do
    told = CliRunner().invoke(app, ["inspect", str(tmp_path / "drafter"), "--block-size", "4", "--json"])
    assert told.exit_code == 0, told.output
    found = json.loads(told.output)
    assert (found["dialect"], found["config"]["block_size"], found["problems"]) == ("k3-dspark", 4, [])
    assert {name: one["verdict"] for name, one in found["engines"].items()} == {
        **{"sglang": "refused", "vllm": "served", "tensorrt-llm": "refused"},
        "torch": "not known",  # the target, whose family the embedded engine asks for first
    }
    rows = CliRunner().invoke(app, ["inspect", str(tmp_path / "drafter"), "--block-size", "4"]).output
    assert "4 heads of 24, a latent vector of 24 for K/V, queries of rank 24" in rows
    assert "96 bytes in all layers" in rows


def test_vllm_is_given_its_class_and_each_device_the_whole_latent_vector(tmp_path: Path) -> None:
    gpus = {"hardware": {"gpu": "b200", "count": 2}, "parallel": {"tensor": 2}}
    launch = VLLMBackend().launch(deployed(tmp_path, **gpus))
    assert launch.problems == []
    argv = launch.command(tmp_path / "out").argv
    config = json.loads(argv[argv.index("--speculative-config") + 1])
    assert (config["method"], config["num_speculative_tokens"]) == ("dspark", BLOCK_SIZE - 1)
    assert launch.memory is not None
    alone = VLLMBackend().launch(deployed(tmp_path, **gpus, speculation={"width": "off"})).memory
    assert alone is not None
    assert launch.memory.token - alone.token == 96
    shown = next(file for file in launch.files(tmp_path / "out") if file.name == "draft/config.json")
    launch.prepare(tmp_path / "out")
    written = json.loads((tmp_path / "out/draft/config.json").read_text())
    assert {"architectures": ["K3DSparkModel"], "block_size": 3}.items() <= written.items()
    assert json.loads(shown.text or "").keys() <= written.keys()
    kept, given = (load_file(tmp_path / name / "model.safetensors") for name in ("out/draft", "drafter"))
    assert kept.keys() == given.keys() - {"embed_tokens.weight"}
    assert all(torch.equal(tensor, given[name]) for name, tensor in kept.items())
    on_a_cpu = VLLMBackend().launch(deployed(tmp_path, hardware={"gpu": "none"})).problems
    assert "a DSpark drafter, which vLLM's V1 model runner has not" in str(on_a_cpu[0])


def test_others_say_in_one_line_that_they_have_no_such_drafters(tmp_path: Path) -> None:
    deployment = deployed(tmp_path)
    checkpoint = open_checkpoint(tmp_path / "drafter", block_size=BLOCK_SIZE)
    whys = {name: checkpoint_verdict(backend(name), checkpoint, "qwen3").why for name in ("torch", "sglang")}
    assert whys["torch"] == "latent attention (MLA), which the embedded engine and training have not"
    assert whys["sglang"] == "latent attention (MLA) in a drafter, of which SGLang 0.5.23 has no class"
    problems = SGLangBackend().launch(deployment).problems
    assert any("has no class" in problem.what for problem in problems)
    assert checkpoint.config is not None
    with pytest.raises(UserError, match="latent attention"):
        Drafter(checkpoint.config)
    options = ["--to", "deepspec", "--block-size", "4"]
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "drafter"), str(tmp_path / "z"), *options])
    assert isinstance(done.exception, UserError)
    assert "the deepspec dialect has no way to write latent attention (MLA)" in str(done.exception)


def test_a_quantised_one_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    """vLLM would look for its list of spared modules under its own names; no published drafter shows others."""
    tensors = write_latent_drafter(tmp_path)
    for layer in range(2):
        name = f"layers.{layer}.mlp.down_proj.weight"
        tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.tensor(1.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    edit_json(tmp_path / "config.json", {"block_size": 3, "quantization_config": {"quant_method": "fp8"}})
    found = [problem.what for problem in open_checkpoint(tmp_path).problems]
    assert found == ["a quantised drafter with latent attention (MLA), of which no published one shows the names"]
