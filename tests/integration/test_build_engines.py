"""The real tools on tiny models: ModelOpt, ONNX, onnxruntime and TensorRT-RTX, all on a CPU.

Needs `pip install 'dflash-serve[engines]'`; skipped where that is not installed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("modelopt", reason="needs dflash-serve[engines]")
pytest.importorskip("onnxruntime", reason="needs dflash-serve[engines]")
pytest.importorskip("tensorrt_rtx_bindings", reason="needs dflash-serve[engines]")

from dflash_engines.calibration import ANSWERS, drafter_ranges, free_ranges
from dflash_engines.onnx_export import export_fp16, export_quantized
from dflash_engines.pipeline import Measured, Work
from dflash_engines.quantize import EXCLUDED, quantize_drafter, quantize_target, quantized_state
from dflash_engines.recipe import Checkpoints, OnnxPrecision
from dflash_engines.rtx import compile_engines
from dflash_engines.trtllm_checkpoint import write_checkpoints
from dflash_serve.checkpoint.formats import Format, QuantizedTensor, quantize
from dflash_serve.checkpoint.manifest import read_manifest
from dflash_serve.checkpoint.reader import load_weights, read_drafter
from dflash_serve.deployment import Deployment
from tests.support.tiny import random_tensors, tiny_drafter_config, write_tiny_drafter

FORMATS: list[Format] = ["fp8", "nvfp4"]
DEPLOYMENT = Deployment.model_validate(
    {"target": {"model": "t"}, "limits": {"max_batch_size": 4, "max_model_len": 128}}
)


class Bench:
    """Folders of steps by name; `run` makes one."""

    def __init__(self, root: Path) -> None:
        self.root, self.folders = root, dict[str, Path]()

    def run(self, name: str, step: Callable[[Work], Measured]) -> Any:
        folder = self.root / name
        folder.mkdir()
        self.folders[name] = folder
        return step(Work(folder, self.folders, lambda line: None))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A random Llama of 8 layers and a random drafter for it, and made-up answers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    bench = Bench(tmp_path_factory.mktemp("bench"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=128, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, tie_word_embeddings=False,
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
    bench.run("onnx-fp16", export_fp16)
    return bench


@pytest.mark.parametrize("format", FORMATS)
def test_our_formats_are_modelopts_bit_for_bit(format: Format) -> None:
    tensors = random_tensors(tiny_drafter_config(), dtype=torch.bfloat16)
    ranges = {name.removesuffix(".weight"): torch.tensor(3.0) for name in tensors}
    state = quantized_state(tensors, ranges, format)
    name = "layers.0.mlp.up_proj"
    ours = quantize(tensors[f"{name}.weight"], format)
    theirs = QuantizedTensor(
        format, state[f"{name}.weight"], state[f"{name}.weight_scale"], state.get(f"{name}.weight_scale_2")
    )
    assert torch.equal(ours.dequantize(), theirs.dequantize())
    assert torch.equal(ours.values.view(torch.uint8), theirs.values.view(torch.uint8))


@pytest.mark.parametrize("format", FORMATS)
def test_a_quantised_drafter_is_whole_and_names_what_it_left_out(format: Format, bench: Bench) -> None:
    folder = bench.folders[f"drafter-{format}"]
    config, quantization = read_drafter(folder)
    assert config == tiny_drafter_config()
    assert quantization is not None
    assert (quantization.format, quantization.excluded) == (format, EXCLUDED)
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
    scales = {
        float(w.input_scale) for w in weights.values() if isinstance(w, QuantizedTensor) and w.input_scale is not None
    }
    assert scales == {1.0}
    errors = alone.run("onnx-fp16", export_fp16)["relative_error"]
    assert max(errors.values()) < 0.01


@pytest.mark.parametrize(("format", "kv"), [("fp8", "FP8"), ("nvfp4", None)])
def test_a_quantised_target_stays_within_the_formats_error(format: Format, kv: str | None, bench: Bench) -> None:
    measured = bench.run(f"target-{format}", lambda work: quantize_target(work, format))
    assert 0 < measured["worst_error"] < (0.04 if format == "fp8" else 0.15)
    fields = json.loads((bench.folders[f"target-{format}"] / "config.json").read_text())["quantization_config"]
    assert (fields["quant_method"], fields["quant_algo"]) == ("modelopt", format.upper())
    assert fields["kv_cache_quant_algo"] == kv
    assert "lm_head" in fields["exclude_modules"]


def test_checkpoints_of_1_to_8_ranks_go_back_together(bench: Bench) -> None:
    wanted = Checkpoints(tensor=(1, 2, 4, 8))
    measured = bench.run("trtllm-checkpoints", lambda work: write_checkpoints(work, DEPLOYMENT, wanted))
    for size in wanted.tensor:
        entry = measured[f"tp{size}"]
        assert entry["worst_error"] < 0.04
        assert entry["servable"] is True
        folder = bench.folders["trtllm-checkpoints"] / f"tp{size}"
        assert json.loads((folder / "config.json").read_text())["mapping"]["tp_size"] == size
        assert json.loads((folder / "trtllm-build.json").read_text())["legacy"] is True


@pytest.mark.parametrize(("precision", "bound"), [("fp8", 0.1), ("nvfp4", 0.25)])
def test_quantised_graphs_compute_what_the_core_computes(precision: Any, bound: float, bench: Bench) -> None:
    measured = bench.run(f"onnx-{precision}", lambda work: export_quantized(work, precision))
    assert measured["quantised_products"] == {"block": 14, "context": 4}
    assert all(0 < error < bound for error in measured["relative_error"].values())


def test_the_compiler_makes_engines_and_its_refusals_are_written_down(bench: Bench) -> None:
    precisions: tuple[OnnxPrecision, ...] = ("fp16", "nvfp4")
    for precision in precisions:
        step = partial(compile_engines, deployment=DEPLOYMENT, precision=precision, compute=("sm89", "sm120"))
        compiled = bench.run(f"rtx-{precision}", step)
        for graph in ("block", "context"):
            assert compiled[f"{graph}.sm120"]["bytes"] > 0
            assert (bench.folders[f"rtx-{precision}"] / f"{graph}.sm120.engine").stat().st_size > 0
    assert "fp4" in compiled["block.sm89"]["not_built"]


RECIPE = """
deployment:
  target: {{model: smollm2}}
  drafter: {{model: smollm2}}
  limits: {{max_model_len: 256, max_batch_size: 2}}
build:
  drafter: [fp8]
  onnx: [fp16, fp8]
  rtx: [sm120]
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
    argv = [sys.executable, "-m", "dflash_serve.cli.main", "build", str(recipe), "--output", str(output)]
    argv[1:3] = ["-c", "from dflash_serve.cli.main import run; run()"]
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
    engine = (output / "rtx-fp8" / "block.sm120.engine").resolve()
    data = bytearray(engine.read_bytes())
    data[len(data) // 2] ^= 1
    engine.write_bytes(data)
    checked = subprocess.run([*argv, "--verify"], capture_output=True, text=True, check=False)
    assert checked.returncode == 1
    assert "sha256 differs" in checked.stdout
