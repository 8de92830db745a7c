"""A quantised drafter is read with all its scales, or refused with an error that names the format."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_serve.checkpoint.formats import Format, dequantized, quantize
from dflash_serve.checkpoint.quantization import Quantization, read_quantization
from dflash_serve.checkpoint.reader import load_weights, open_checkpoint, read_config
from dflash_serve.errors import UserError
from dflash_serve.models.loader import load_drafter
from tests.support.built import seal
from tests.support.tiny import (
    edit_json,
    problems_of,
    random_tensors,
    tiny_drafter_config,
    write_quantized_drafter,
    write_tiny_drafter,
)


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_a_quantised_drafter_reads_back(format: Format, tmp_path: Path) -> None:
    folder = write_quantized_drafter(tmp_path / "d", format)
    checkpoint = open_checkpoint(folder)
    assert (problems_of(folder), checkpoint.quantization) == ([], Quantization(format, ("fc",)))
    config, weights = load_weights(folder)
    assert config == checkpoint.config == read_config(folder)[0]
    plain, original = dequantized(weights, torch.float32), random_tensors(config)
    assert plain.keys() == original.keys()
    name = "layers.1.mlp.down_proj.weight"
    assert torch.equal(plain[name], quantize(original[name], format).dequantize())
    assert torch.equal(plain["fc.weight"], original["fc.weight"])


def test_an_unquantised_drafter_says_so(tmp_path: Path) -> None:
    folder = write_tiny_drafter(tmp_path / "d")
    assert read_quantization(folder) is None
    config, checkpoint = read_config(folder)
    assert (config, checkpoint.quantization) == (tiny_drafter_config(), None)


def test_modelopts_own_nesting_is_understood(tmp_path: Path) -> None:
    folder = write_quantized_drafter(tmp_path / "d", "nvfp4")
    inner = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["fc"]}
    edit_json(folder / "config.json", {"quantization_config": {"quantization": inner}})
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": inner}))
    found = read_quantization(folder)
    assert found is not None
    assert (found.format, found.excluded, found.kv_cache) == ("nvfp4", ("fc",), None)


@pytest.mark.parametrize(
    ("inline", "beside", "words"),
    [
        ({"quant_algo": "NVFP4"}, "FP8", r"quantization_config says nvfp4, hf_quant_config\.json says fp8"),
        ({"quant_method": "gptq"}, None, "quantised with 'gptq'"),
        ("fp8", None, "quantization_config is 'fp8', not an object"),
    ],
)
def test_a_quantisation_that_cannot_be_read_is_refused(
    inline: object, beside: str | None, words: str, tmp_path: Path
) -> None:
    folder = write_tiny_drafter(tmp_path / "d")
    edit_json(folder / "config.json", {"quantization_config": inline})
    if beside is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": beside}}))
    for read in (read_config, read_quantization):
        with pytest.raises(UserError, match=words):
            read(folder)


Q, UP = "layers.0.self_attn.q_proj", "layers.0.mlp.up_proj"
BAD_TENSORS: list[tuple[Format, dict[str, Tensor | None], str]] = [
    ("nvfp4", {f"{Q}.weight_scale": None}, r"q_proj\.weight_scale \[64, 2\] is missing"),
    ("nvfp4", {f"{Q}.weight": None}, r"q_proj\.weight \[64, 32\] is missing"),
    ("nvfp4", {f"{UP}.weight_scale_2": None}, r"up_proj\.weight_scale_2 \[\] is missing"),
    ("fp8", {"layers.7.mlp.up_proj.weight": torch.zeros(2, 2)}, r"up_proj.weight \[2, 2\] is not part of a DFlash"),
    ("fp8", {f"{UP}.weight_scale": torch.ones(64)}, r"up_proj\.weight_scale has shape \[64\], .* \[\]"),
    ("fp8", {f"{UP}.weight": torch.zeros(64, 32, dtype=torch.uint8)}, "weight is U8"),
    ("fp8", {f"{UP}.weight": torch.zeros(64, 2).to(torch.float8_e4m3fn)}, r"\[64, 2\], .* \[64, 32\]"),
    ("fp8", {"fc.weight_scale": torch.tensor(1.0)}, r"fc\.weight_scale \[\] belongs to no quantised weight"),
    ("fp8", {"norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}, r"norm\.weight is F8_E4M3, not BF16"),
    ("fp8", {f"{UP}.weight_scale": torch.tensor(float("nan"))}, "1 values that are NaN"),
    ("fp8", {f"{UP}.weight": torch.full((64, 32), float("nan")).to(torch.float8_e4m3fn)}, "2048 values"),
]


@pytest.mark.parametrize(("format", "change", "message"), BAD_TENSORS, ids=[message for *_, message in BAD_TENSORS])
def test_a_tensor_that_is_lost_or_does_not_fit_is_named(
    format: Format, change: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    folder = write_quantized_drafter(tmp_path / "d", format)
    state = {**load_file(folder / "model.safetensors"), **change}
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, folder / "model.safetensors")
    assert any(re.search(message, str(problem)) for problem in problems_of(folder))
    with pytest.raises(UserError):
        load_weights(folder)


def test_a_reader_of_plain_weights_refuses_a_quantised_drafter_by_name(tmp_path: Path) -> None:
    folder = write_quantized_drafter(tmp_path / "d", "fp8")
    with pytest.raises(UserError, match="quantised to FP8, this command reads bf16 drafters only"):
        load_drafter(folder)


def test_packed_weights_that_no_file_explains_are_refused(tmp_path: Path) -> None:
    folder = write_quantized_drafter(tmp_path / "d", "nvfp4")
    (folder / "hf_quant_config.json").unlink()
    edit_json(folder / "config.json", {"quantization_config": None})
    with pytest.raises(UserError, match=r"the weights are quantised .* but no file names the format"):
        load_weights(folder)


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_a_fused_projection_is_cut_with_its_scales(format: Format, tmp_path: Path) -> None:
    folder = write_quantized_drafter(tmp_path / "d", format)
    state, whole = load_file(folder / "model.safetensors"), torch.randn(128, 32)
    for name in [name for name in state if name.startswith(("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"))]:
        del state[name]
    fused = quantize(whole, format)
    save_file(state | fused.state("model.layers.0.mlp.gate_up_proj"), folder / "model.safetensors")
    assert problems_of(folder) == []
    plain = dequantized(load_weights(folder)[1], torch.float32)
    assert torch.equal(plain["layers.0.mlp.gate_proj.weight"], fused.dequantize()[:64])
    assert torch.equal(plain["layers.0.mlp.up_proj.weight"], fused.dequantize()[64:])


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_fused_products_with_scales_of_their_own_are_named(format: Format, tmp_path: Path) -> None:
    """As `build` 0.1.0 wrote them: TensorRT-LLM would not load them, SGLang and vLLM would read them wrongly."""
    folder = seal(write_quantized_drafter(tmp_path / "d", format, fused=False))
    (problem,) = open_checkpoint(folder).unshared
    assert "gate_proj, up_proj of layers.0.mlp do not share their scales, nor do 3 other groups" in str(problem)
    assert (problem.where, "`dflash-serve convert` gives them one" in problem.do) == (str(folder), True)
    assert problems_of(folder) == []


def test_an_fp8_drafter_of_others_may_leave_the_rounding_to_the_engine(tmp_path: Path) -> None:
    """ModelOpt's exporter leaves FP8 parts their own scales, and every engine reads them."""
    assert open_checkpoint(write_quantized_drafter(tmp_path / "d", "fp8", fused=False)).unshared == []


@pytest.mark.parametrize("scale", ["input_scale", "weight_scale_2"])
def test_one_scale_that_differs_is_enough(scale: str, tmp_path: Path) -> None:
    folder = write_quantized_drafter(tmp_path / "d", "nvfp4")
    state = load_file(folder / "model.safetensors")
    state[f"layers.1.mlp.up_proj.{scale}"] *= 1.5
    save_file(state, folder / "model.safetensors")
    assert [problem.what.split(";")[0] for problem in open_checkpoint(folder).unshared] == [
        "gate_proj, up_proj of layers.1.mlp do not share their scales"
    ]
    state[f"layers.1.mlp.gate_proj.{scale}"] *= 1.5
    save_file(state, folder / "model.safetensors")
    assert open_checkpoint(folder).unshared == []
