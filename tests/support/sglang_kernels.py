"""Quantised products of SGLang, whose kernels are for GPUs, on a CPU: x W', W the numbers that the loaded tensors mean.

SGLang's own methods make the parameters and load them; only what follows is replaced. Kernels of W8A8 and NVFP4 also
round the activations; these do not. They multiply in float32, too, in which losslessness is exact.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from dflash_serve.checkpoint.formats import GROUP, unpack_fp4

METHODS = {
    "sglang.srt.layers.quantization.modelopt_quant": (
        *("ModelOptFp8LinearMethod", "ModelOptFp4LinearMethod", "ModelOptNvFp4A16LinearMethod"),
    ),
    "sglang.srt.layers.quantization.fp8": ("Fp8LinearMethod",),
}
CONFIGS = {
    "sglang.srt.layers.quantization.modelopt_quant": ("ModelOptFp8Config", "ModelOptFp4Config"),
    "sglang.srt.layers.quantization.fp8": ("Fp8Config",),
    "sglang.srt.layers.quantization.compressed_tensors.compressed_tensors": ("CompressedTensorsConfig",),
}
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SCHEMES = ("W8A8Int8", "WNA16", "W8A8Fp8", "W8A16Fp8", "W4A4Fp4", "W4A16Fp4")
BLOCK = 128


def numbers(layer: Any) -> Tensor:
    """The weight [out, in] of a fused product, from its parameters as they were loaded."""
    given: dict[str, Tensor] = {name: parameter.data for name, parameter in layer.named_parameters(recurse=False)}
    stored = given["weight_packed"] if "weight_packed" in given else given["weight"]
    scale = given["weight_scale_inv"] if "weight_scale_inv" in given else given["weight_scale"]
    if stored.dtype == torch.int32:
        bits: int = 32 // layer.scheme.pack_factor
        shifts = torch.arange(32 // bits) * bits
        whole = ((stored.long()[..., None] >> shifts) & (2**bits - 1)) - 2 ** (bits - 1)
        found: Tensor = (whole.float().view(*scale.shape, -1) * scale[..., None].float()).view(len(stored), -1)
        return found
    if stored.dtype == torch.uint8:
        of_tensor = given["weight_scale_2"] if "weight_scale_2" in given else 1 / given["weight_global_scale"]
        values = unpack_fp4(stored)
        spread = scale.float() * _by_row(of_tensor.float(), layer.logical_widths)
        return (values.view(len(values), -1, GROUP) * spread[..., None]).view(values.shape)
    rows, columns = stored.shape
    if scale.dim() == 2 and tuple(scale.shape) != (rows, 1):
        spread = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        return stored.float() * spread.float()
    return stored.float() * (_by_row(scale, layer.logical_widths) if scale.dim() < 2 else scale.float())


def _by_row(of_parts: Tensor, heights: list[int]) -> Tensor:
    """One number for each part of a fused product -> [out, 1]."""
    each = of_parts.reshape(-1).expand(len(heights)) if of_parts.numel() == 1 else of_parts
    return torch.cat([value.expand(height, 1) for value, height in zip(each, heights, strict=True)])


def install(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """Puts them in place of SGLang's kernels, as on a GPU of this compute capability."""
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors, schemes

    def settle(self: Any, layer: Any) -> None:
        layer.numbers = numbers(layer)

    def multiply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, layer.numbers.to(x.dtype), bias)

    for module, names in METHODS.items():
        for name in names:
            method = getattr(import_module(module), name)
            monkeypatch.setattr(method, "process_weights_after_loading", settle)
            monkeypatch.setattr(method, "apply", multiply)
    for module, names in CONFIGS.items():
        for name in names:
            config = getattr(import_module(module), name)
            monkeypatch.setattr(config, "get_supported_act_dtypes", classmethod(lambda _: FLOATS))
    for name in SCHEMES:
        scheme = getattr(schemes, f"CompressedTensors{name}")
        monkeypatch.setattr(scheme, "process_weights_after_loading", settle)
        monkeypatch.setattr(scheme, "apply_weights", multiply)
    monkeypatch.setattr(compressed_tensors.torch.cuda, "get_device_capability", lambda *_: capability)
