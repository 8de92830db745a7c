"""Targets in the layouts that quantisers write: the products' weights replaced by packed ones and their scales."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .tiny import edit_json

WEIGHTS = "model.safetensors"
Named = Iterator[tuple[str, Tensor]]


def _fp8(weight: Tensor) -> Tensor:
    return weight.to(torch.float8_e4m3fn)


def _fp8_block(weight: Tensor) -> Named:
    yield from (("weight", _fp8(weight)), ("weight_scale_inv", torch.ones(1, 1)))


def _fp8_tensor(weight: Tensor) -> Named:
    yield from (("weight", _fp8(weight)), ("weight_scale", torch.tensor(1.0)), ("input_scale", torch.tensor(1.0)))


def _fp8_channel(weight: Tensor) -> Named:
    yield from (("weight", _fp8(weight)), ("weight_scale", torch.ones(len(weight), 1)))


def _fp8_alone(weight: Tensor) -> Named:
    yield "weight", _fp8(weight)


def _int8(weight: Tensor) -> Named:
    yield from (("weight", weight.to(torch.int8)), ("weight_scale", torch.ones(len(weight), 1)))


def _awq(weight: Tensor) -> Named:
    outputs, inputs = weight.shape
    yield "qweight", torch.zeros(inputs, outputs // 8, dtype=torch.int32)
    yield from (("qzeros", torch.zeros(1, outputs // 8, dtype=torch.int32)), ("scales", torch.ones(1, outputs).half()))


def _gptq(weight: Tensor) -> Named:
    outputs, inputs = weight.shape
    yield "qweight", torch.zeros(inputs // 8, outputs, dtype=torch.int32)
    yield from (("qzeros", torch.zeros(1, outputs // 8, dtype=torch.int32)), ("scales", torch.ones(1, outputs).half()))
    yield "g_idx", torch.zeros(inputs, dtype=torch.int32)


def _nvfp4(weight: Tensor) -> Named:
    outputs, inputs = weight.shape
    yield "weight", torch.zeros(outputs, inputs // 2, dtype=torch.uint8)
    yield from (("weight_scale", _fp8(torch.ones(outputs, inputs // 16))), ("weight_scale_2", torch.tensor(1.0)))


def _nvfp4_packed(weight: Tensor) -> Named:
    outputs, inputs = weight.shape
    yield "weight_packed", torch.zeros(outputs, inputs // 2, dtype=torch.uint8)
    yield from (("weight_scale", _fp8(torch.ones(outputs, inputs // 16))), ("weight_global_scale", torch.ones(1)))


def _mxfp4(weight: Tensor) -> Named:
    outputs, inputs = weight.shape
    yield "weight_packed", torch.zeros(outputs, inputs // 2, dtype=torch.uint8)
    yield "weight_scale", torch.zeros(outputs, -(-inputs // 32), dtype=torch.uint8)


def _packed(weight: Tensor) -> Named:
    outputs, inputs = weight.shape
    yield "weight_packed", torch.zeros(outputs, inputs // 8, dtype=torch.int32)
    yield from (("weight_scale", torch.ones(outputs, 1).bfloat16()), ("weight_shape", torch.tensor([outputs, inputs])))


def _nf4(weight: Tensor) -> Named:
    yield "weight", torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8)
    yield from (("weight.absmax", torch.ones(1)), ("weight.quant_map", torch.ones(16)))


LAYOUTS: Mapping[str, tuple[Mapping[str, object], Callable[[Tensor], Named], str]] = {
    "FP8 by block": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, _fp8_block, "FP8 by block"),
    "FP8 per tensor": ({"quant_method": "modelopt", "quant_algo": "FP8"}, _fp8_tensor, "FP8 per tensor"),
    "FP8 per channel": ({"quant_method": "compressed-tensors", "format": "float-quantized"}, _fp8_channel, "FP8"),
    "FP8 without scales": ({"quant_method": "fp8"}, _fp8_alone, "FP8"),
    "INT8": ({"quant_method": "compressed-tensors", "format": "int-quantized"}, _int8, "INT8"),
    "AWQ": ({"quant_method": "awq", "bits": 4}, _awq, "AWQ"),
    "GPTQ": ({"quant_method": "gptq", "bits": 4}, _gptq, "GPTQ"),
    "NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, _nvfp4, "NVFP4"),
    "NVFP4, packed": ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, _nvfp4_packed, "NVFP4"),
    "MXFP4": ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, _mxfp4, "MXFP4"),
    "compressed-tensors": ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, _packed, "INT4"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, _nf4, "bitsandbytes"),
}
"""Layout -> its recipe, the tensors beside or instead of a weight, and the scheme's name."""


def write_quantised_target(
    plain: Path, folder: Path, layout: str, *, recipe: str | None = "quantization_config"
) -> Path:
    """A copy of a plain target in another layout; `recipe` is the key or file that tells of it, None = nothing does."""
    shutil.copytree(plain, folder)
    said, packed, _ = LAYOUTS[layout]
    state: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        module = name.removesuffix(".weight")
        if name.endswith("_proj.weight"):
            state |= {f"{module}.{kind}": part.contiguous() for kind, part in packed(tensor)}
        else:
            state[name] = tensor
    save_file(state, folder / WEIGHTS)
    if recipe is not None and recipe.endswith(".json"):
        (folder / recipe).write_text(json.dumps({"quantization": said}))
    elif recipe is not None:
        edit_json(folder / "config.json", {recipe: said})
    return folder
