"""A quantised drafter is read whole or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_serve.checkpoint.formats import Format, quantize
from dflash_serve.checkpoint.quantization import dequantized, load_weights, read_drafter, read_quantization
from dflash_serve.errors import UserError
from tests.support.tiny import edit_json, random_tensors, tiny_drafter_config, write_tiny_drafter

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_quantized(folder: Path, format: Format) -> Path:
    config = tiny_drafter_config(intermediate_size=64)
    write_tiny_drafter(folder, config)
    state: dict[str, Tensor] = {}
    for name, tensor in random_tensors(config).items():
        module = name.removesuffix(".weight")
        packed = module.rsplit(".", 1)[-1] in PROJECTIONS
        state |= quantize(tensor, format, torch.tensor(0.01)).state(module) if packed else {name: tensor}
    save_file(state, folder / "model.safetensors")
    entry = {"quant_method": "modelopt", "quant_algo": format.upper(), "exclude_modules": ["fc"]}
    edit_json(folder / "config.json", {"quantization_config": entry})
    return folder


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_a_quantised_drafter_reads_back(format: Format, tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "d", format)
    config, weights = load_weights(folder)
    plain, original = dequantized(weights, torch.float32), random_tensors(config)
    assert plain.keys() == original.keys()
    name = "layers.1.mlp.down_proj.weight"
    assert torch.equal(plain[name], quantize(original[name], format).dequantize())
    assert torch.equal(plain["fc.weight"], original["fc.weight"])


def test_an_unquantised_drafter_says_so(tmp_path: Path) -> None:
    folder = write_tiny_drafter(tmp_path / "d")
    assert read_quantization(folder) is None
    assert read_drafter(folder) == (tiny_drafter_config(), None)


def test_modelopts_own_nesting_is_understood(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "d", "nvfp4")
    inner = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["fc"]}
    edit_json(folder / "config.json", {"quantization_config": {"quantization": inner}})
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": inner}))
    found = read_quantization(folder)
    assert found is not None
    assert (found.format, found.excluded, found.kv_cache) == ("nvfp4", ("fc",), None)


def test_two_files_that_disagree_are_refused(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "d", "nvfp4")
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(UserError, match=r"config\.json says nvfp4, hf_quant_config\.json says fp8"):
        read_quantization(folder)


def test_another_algorithm_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_tiny_drafter(tmp_path / "d")
    edit_json(folder / "config.json", {"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(UserError, match="quantised with 'gptq'"):
        read_drafter(folder)


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("layers.0.self_attn.q_proj.weight_scale", "without a weight_scale|not those of"),
        ("layers.0.self_attn.q_proj.weight", "q_proj.weight is missing"),
        ("layers.1.mlp.up_proj.weight_scale_2", "which are not those of nvfp4"),
    ],
)
def test_a_lost_tensor_is_named(drop: str, message: str, tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "d", "nvfp4")
    state = load_file(folder / "model.safetensors")
    del state[drop]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load_weights(folder)


def test_a_tensor_too_many_is_named(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "d", "fp8")
    state = load_file(folder / "model.safetensors")
    save_file(state | {"layers.7.mlp.up_proj.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"layers\.7\.mlp\.up_proj\.weight is not part of this drafter"):
        load_weights(folder)
