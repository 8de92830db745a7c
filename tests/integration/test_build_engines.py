"""The real ModelOpt on tiny models, on a CPU.

Needs `pip install 'dflash-serve[engines]'`; skipped where that is not installed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("modelopt", reason="needs dflash-serve[engines]")

from dflash_engines.calibration import ANSWERS, drafter_ranges, free_ranges
from dflash_engines.pipeline import Measured, Work
from dflash_engines.quantize import (
    EXCLUDED,
    decoded,
    quantize_drafter,
    quantize_target,
    quantized_state,
    read_checkpoint,
)
from dflash_engines.recipe import Checkpoints
from dflash_engines.trtllm_checkpoint import write_checkpoints
from dflash_serve.checkpoint.files import read_manifest
from dflash_serve.checkpoint.formats import Format, QuantizedTensor, quantize
from dflash_serve.checkpoint.quantization import Quantization
from dflash_serve.checkpoint.reader import load_weights, read_config
from dflash_serve.checkpoint.tensors import FUSED
from dflash_serve.deployment.description import Deployment
from tests.support.built import flip_last_byte
from tests.support.engine_readers import FUSED_BY
from tests.support.tiny import quantized_state as stand_in
from tests.support.tiny import random_tensors, tiny_drafter_config, write_tiny_drafter

FORMATS: list[Format] = ["fp8", "nvfp4"]
DEPLOYMENT = Deployment.model_validate(
    {"target": {"model": "t"}, "limits": {"max_batch_size": 4, "max_model_len": 128}}
)


class Bench:
    """Folders of steps by name; `run` makes one."""

    def __init__(self, root: Path) -> None:
        self.root, self.folders, self.measured = root, dict[str, Path](), dict[str, Any]()

    def run(self, name: str, step: Callable[[Work], Measured]) -> Any:
        folder = self.folders[name] = self.root / name
        folder.mkdir()
        self.measured[name] = step(Work(folder, self.folders, lambda line: None))
        return self.measured[name]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A random Llama of 8 layers and a random drafter for it, and made-up answers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    bench = Bench(tmp_path_factory.mktemp("bench"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=128, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(bench.root / "target")
    bench.folders["target"] = bench.root / "target"
    bench.folders["drafter"] = write_tiny_drafter(bench.root / "drafter", dtype=torch.bfloat16)
    (bench.root / "answers").mkdir()
    lines = [{"prompt": list(range(1, 9)), "answer": [int(n) for n in torch.randint(96, (24,))]} for _ in range(3)]
    (bench.root / "answers" / ANSWERS).write_text("\n".join(map(json.dumps, lines)))
    bench.folders["answers"] = bench.root / "answers"
    bench.run("drafter-ranges", drafter_ranges)
    for format in FORMATS:
        bench.run(f"drafter-{format}", partial(quantize_drafter, format=format))
        bench.run(f"target-{format}", partial(quantize_target, format=format))
    return bench


@pytest.mark.parametrize("format", FORMATS)
def test_our_formats_are_modelopts_bit_for_bit(format: Format) -> None:
    """Every tensor, scales included, is as the drafters that tests write without ModelOpt have it."""
    config = tiny_drafter_config()
    tensors = random_tensors(config, dtype=torch.bfloat16)
    ranges = {name.removesuffix(".weight"): torch.tensor(3.0) for name in tensors}
    theirs = quantized_state(config, tensors, ranges, format)
    largest = 448 * (6 if format == "nvfp4" else 1)
    ours = stand_in(tensors, format, torch.tensor(3.0 / largest))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == ours[name].dtype, name
        assert torch.equal(*(stored.flatten().view(torch.uint8) for stored in (tensor, ours[name]))), name


def test_activations_are_rounded_by_a_static_scale_as_modelopt_does_bit_for_bit() -> None:
    """The acceptance step rounds by it. NVFP4 with values beyond its reach, too."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    rows, scale = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 3, torch.tensor(0.004)
    rows[0, 5] = 100.0
    fp8, nvfp4 = (quantize(rows, format, of_tensor=scale) for format in FORMATS)
    theirs, block_scales, _ = NVFP4QTensor.quantize(rows, 16, None, scale)
    assert torch.equal(theirs._quantized_data, nvfp4.values)
    assert torch.equal(block_scales.float(), nvfp4.scale.float())
    inside = rows.abs() < 448 * scale
    theirs, _ = FP8QTensor.quantize(rows, scale)
    assert torch.equal(theirs._quantized_data.float()[inside], fp8.values.float()[inside])


@pytest.mark.parametrize("engine", FUSED_BY)
@pytest.mark.parametrize("format", FORMATS)
def test_every_engine_reads_a_drafters_fused_products_to_the_bit(format: Format, engine: str, bench: Bench) -> None:
    _, weights = load_weights(bench.folders[f"drafter-{format}"])
    for names in fused_groups(weights):
        parts = [weight for name in names if isinstance(weight := weights[name], QuantizedTensor)]
        assert len(parts) == len(names)
        assert len({float(part.input_scale) for part in parts if part.input_scale is not None}) == 1
        assert torch.equal(FUSED_BY[engine](parts), torch.cat([part.dequantize() for part in parts]))


def fused_groups(tensors: Collection[str]) -> list[list[str]]:
    """The names of the weights that engines fuse, group by group."""
    return [
        [name.replace(f".{parts[0]}.", f".{part}.") for part in parts]
        for parts in FUSED.values()
        for name in tensors
        if name.endswith(f".{parts[0]}.weight")
    ]


@pytest.mark.parametrize("format", FORMATS)
def test_a_quantised_drafter_is_whole_and_its_inline_config_is_modelopts_own(format: Format, bench: Bench) -> None:
    folder = bench.folders[f"drafter-{format}"]
    inline = json.loads((folder / "config.json").read_text())["quantization_config"]
    (group,) = inline["config_groups"].values()
    assert (group["weights"]["num_bits"], group["targets"]) == (8 if format == "fp8" else 4, ["Linear"])
    assert (inline["quant_method"], inline["quant_algo"], inline["ignore"]) == (
        "modelopt", format.upper(), list(EXCLUDED),
    )  # fmt: skip
    config, checkpoint = read_config(folder)
    assert config == tiny_drafter_config()
    assert checkpoint.quantization == Quantization(format, EXCLUDED)
    _, weights = load_weights(folder)
    packed = {name for name, weight in weights.items() if isinstance(weight, QuantizedTensor)}
    assert packed == {name for name in weights if name.endswith("_proj.weight")}
    assert all(weights[name].input_scale is not None for name in packed)  # type: ignore[union-attr]


def test_without_data_a_drafter_is_quantised_all_the_same(bench: Bench, tmp_path: Path) -> None:
    alone = Bench(tmp_path)
    alone.folders["drafter"] = bench.folders["drafter"]
    alone.run("drafter-ranges", free_ranges)
    measured = alone.run("drafter-fp8", partial(quantize_drafter, format="fp8"))
    assert measured["worst_error"] < 0.04
    _, weights = load_weights(alone.folders["drafter-fp8"])
    packed = [weight for weight in weights.values() if isinstance(weight, QuantizedTensor)]
    assert {float(weight.input_scale) for weight in packed if weight.input_scale is not None} == {1.0}


@pytest.mark.parametrize("format", FORMATS)
def test_a_quantised_target_stays_within_the_formats_error(format: Format, bench: Bench) -> None:
    assert 0 < bench.measured[f"target-{format}"]["worst_error"] < (0.04 if format == "fp8" else 0.15)
    fields = json.loads((bench.folders[f"target-{format}"] / "config.json").read_text())["quantization_config"]
    assert (fields["quant_method"], fields["quant_algo"]) == ("modelopt", format.upper())
    assert fields["kv_cache_quant_algo"] == "FP8"
    assert "lm_head" in fields["exclude_modules"]
    names = load_file(bench.folders[f"target-{format}"] / "model.safetensors").keys()
    assert {"model.layers.0.self_attn.k_proj.k_scale", "model.layers.7.self_attn.v_proj.v_scale"} <= names


@pytest.mark.parametrize("format", FORMATS)
def test_a_targets_fused_products_share_their_scales(format: Format, bench: Bench) -> None:
    """Of a dense target and of one with experts, in each of them."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = Bench(bench.root / f"experts-{format}")
    experts.root.mkdir()
    experts.folders |= {"target": experts.root / "target", "answers": bench.folders["answers"]}
    config = Qwen3MoeConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=16,
        moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, max_position_embeddings=256,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(experts.folders["target"])
    experts.run("quantised", partial(quantize_target, format=format))
    for folder, groups in ((bench.folders[f"target-{format}"], 16), (experts.folders["quantised"], 2 + 8)):
        tensors = read_checkpoint(folder)
        found = fused_groups(tensors)
        assert len(found) == groups
        for names in found:
            for scale in ("weight_scale_2" if format == "nvfp4" else "weight_scale", "input_scale"):
                values = {float(tensors[name.removesuffix("weight") + scale]) for name in names}
                assert len(values) == 1, (names[0], scale)


@torch.inference_mode()
@pytest.mark.parametrize("format", FORMATS)
def test_an_exported_target_reloads_in_transformers_and_says_the_same(format: Format, bench: Bench) -> None:
    """Logits of its decoded weights in transformers' own model, no farther from the source's than our own rounding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bench.folders["target"], dtype=torch.float32).eval()
    ids, source = torch.arange(1, 33)[None], {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wanted = model(ids).logits.clone()

    def error(state: dict[str, torch.Tensor]) -> float:
        model.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
        return float((model(ids).logits - wanted).norm() / wanted.norm())

    exported = decoded(read_checkpoint(bench.folders[f"target-{format}"]))
    ours = decoded(stand_in(source, format))
    assert 0 < error(exported) < 1.25 * error(ours)


def test_checkpoints_of_1_to_8_ranks_go_back_together(bench: Bench) -> None:
    wanted = Checkpoints(tensor=(1, 2, 4, 8))
    measured = bench.run("trtllm-checkpoints", lambda work: write_checkpoints(work, DEPLOYMENT, wanted))
    for size in wanted.tensor:
        entry = measured[f"tp{size}"]
        assert entry["worst_error"] < 0.04
        assert entry["servable"] is True
        folder = bench.folders["trtllm-checkpoints"] / f"tp{size}"
        fields = json.loads((folder / "config.json").read_text())
        assert fields["mapping"]["tp_size"] == size
        assert (fields["rotary_base"], fields["rotary_scaling"]["type"]) == (500000.0, "llama3")
        assert fields["quantization"]["quant_algo"] == "FP8"
        assert json.loads((folder / "trtllm-build.json").read_text())["legacy"] is True


RECIPE = """
deployment:
  target: {{model: smollm2}}
  drafter: {{model: smollm2}}
  limits: {{max_model_len: 256, max_batch_size: 2}}
build:
  drafter: [fp8]
  calibration: {{count: 1, max_tokens: 8}}
  acceptance: {{prompts: {prompts}, count: 1, max_tokens: 12}}
"""


@pytest.mark.model
def test_killed_between_steps_a_build_goes_on_and_a_flipped_byte_is_caught(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is 7 times 8?"}\n')
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(prompts=prompts))
    output = tmp_path / "out"
    run = "from dflash_serve.cli.main import run; run()"
    argv = [sys.executable, "-c", run, "build", str(recipe), "--output", str(output)]
    killed = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (output / "drafter-ranges").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "answers              there already" in done.stdout
    manifest = read_manifest(output / "acceptance")
    assert manifest is not None
    assert manifest.measured["fp8"]["of_bf16"] > 0  # type: ignore[index]
    flip_last_byte((output / "drafter-fp8" / "model.safetensors").resolve())
    checked = subprocess.run([*argv, "--verify"], capture_output=True, text=True, check=False)
    assert checked.returncode == 1
    assert "sha256 differs" in checked.stdout
