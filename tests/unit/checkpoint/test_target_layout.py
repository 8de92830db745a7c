"""A target's layout from its config.json alone: heads, experts, number formats, and bytes within a few per cent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_serve.checkpoint.target_layout import TargetLayout, read_target_layout
from dflash_serve.deployment import Model, Quantization
from tests.support.paper_models import write_paper_target
from tests.unit.tensorrt_llm.published_targets import TARGETS


def layout(folder: Path, config: object, quantization: Quantization = "none") -> TargetLayout:
    (folder / "config.json").write_text(json.dumps(config))
    return read_target_layout(folder, Model(model="some/target", quantization=quantization))


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("Qwen/Qwen3-8B", 16.4),
        ("meta-llama/Llama-3.1-8B-Instruct", 16.1),
        ("openai/gpt-oss-120b", 65.2),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", 61.1),
        ("moonshotai/Kimi-K2.5", 595),
        ("smollm2", 0.269),
    ],
)
def test_published_sizes_are_met_within_five_per_cent(name: str, gigabytes: float, tmp_path: Path) -> None:
    assert layout(tmp_path, TARGETS[name]).weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.05)


def test_asked_for_formats_shrink_it(tmp_path: Path) -> None:
    plain, fp8, nvfp4 = (layout(tmp_path, TARGETS["Qwen/Qwen3-8B"], q) for q in ("none", "fp8", "nvfp4"))
    assert plain.weight_bytes > fp8.weight_bytes > nvfp4.weight_bytes > plain.weight_bytes / 4


def test_a_latent_target_has_one_vector_a_token(tmp_path: Path) -> None:
    kimi = layout(tmp_path, TARGETS["moonshotai/Kimi-K2.5"])
    assert kimi.latent
    assert kimi.kv_bytes(2) == 61 * 576 * 2
    assert (kimi.experts, kimi.architecture) == (384, "KimiK25ForConditionalGeneration")
    assert kimi.shape.name == "some/target"


@pytest.mark.parametrize(
    ("recipe", "native"),
    [
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "modelopt"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "fp8"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors"),
        ({"quant_method": "awq"}, "awq"),
    ],
)
def test_a_checkpoints_own_format_is_known_by_name(recipe: dict[str, str], native: str, tmp_path: Path) -> None:
    target = write_paper_target(tmp_path / "target", recipe=recipe)
    assert read_target_layout(target, Model(model="t")).native_quantization == native


def test_modelopts_file_beside_config_json_is_read_too(tmp_path: Path) -> None:
    target = write_paper_target(tmp_path / "target")
    beside = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (target / "hf_quant_config.json").write_text(json.dumps(beside))
    found = read_target_layout(target, Model(model="t"))
    assert (found.native_quantization, found.head_is_quantized) == ("nvfp4", False)
