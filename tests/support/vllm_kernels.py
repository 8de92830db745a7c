"""Kernels that vLLM has on GPUs only, for CPUs: each computes x W', W the numbers that the stored tensors stand for.

GPU kernels of W8A8 and NVFP4 also round the activations; these do not. They multiply in float32, too, in which
losslessness is exact.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from dflash_serve.checkpoint.formats import FP8_MAX, GROUP, unpack_fp4

YES = (True, None)
CONFIGS = (("modelopt", "ModelOptFp8Config"), ("modelopt", "ModelOptNvFp4Config"), ("fp8", "Fp8Config"))
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [a, b] -> whole numbers [a, b * 32 / bits], the lowest bits first."""
    found: Tensor = ((words.long()[..., None] >> (torch.arange(32 // bits) * bits)) & (2**bits - 1)).flatten(1)
    return found


def _rounded(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return (values.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts them into vLLM's tables of kernels for CPUs, before those that it has."""
    from vllm.model_executor.kernels import linear as kernels
    from vllm.model_executor.kernels.linear import MPLinearKernel, MxFp4LinearKernel, NvFp4LinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm import (
        Fp8BlockScaledMMLinearKernel,
        FP8ScaledMMLinearKernel,
        Int8ScaledMMLinearKernel,
    )
    from vllm.platforms.interface import PlatformEnum

    class WholeNumbers(MPLinearKernel):  # type: ignore[misc]
        """W4A16 and W8A16 of compressed-tensors, GPTQ and AWQ, with or without zero points."""

        @classmethod
        def get_min_capability(cls) -> int:
            return -1

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            return YES

        def process_weights_after_loading(self, layer: Any) -> None:
            words, scale, zeros = self._get_weight_params(layer)
            bits = self.config.weight_type.size_bits
            values = unpacked(words.data.t() if words.input_dim == 0 else words.data, bits).float()
            by_row = scale.data.float().t() if scale.output_dim == 1 else scale.data.float()
            group = values.shape[1] // by_row.shape[1]
            less: Tensor = torch.tensor(2.0 ** (bits - 1))
            if self.config.zero_points:
                less = unpacked(zeros.data.t(), bits).t().repeat_interleave(group, 1)
            layer.numbers = (values - less) * by_row.repeat_interleave(group, 1)

        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return linear(x, layer.numbers.to(x.dtype), bias)

    class Int8(Int8ScaledMMLinearKernel):  # type: ignore[misc]
        """W8A8; oneDNN's product of bytes overflows on CPUs without VNNI."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return YES

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            return (c.input_symmetric, "is not symmetric")

        def process_weights_after_loading(self, layer: Any) -> None:
            weight, scale, *_ = self._get_layer_params(layer)
            layer.numbers = weight.data.float() * scale.data.view(-1, 1)

        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return linear(x, layer.numbers.to(x.dtype), bias)

    class Fp8(FP8ScaledMMLinearKernel):  # type: ignore[misc]
        """FP8 with a scale of the tensor or of each row; vLLM has turned the weight."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return YES

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            return YES

        def apply_scaled_mm(self, **given: Any) -> Tensor:
            raise AssertionError("apply_weights does it")

        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            weight, scale, *_ = self._get_layer_params(layer)
            return linear(x, (weight.t().float() * scale.reshape(-1, 1).float()).to(x.dtype), bias)

    class Blocks(Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
        """FP8 with a scale for every 128 x 128 values."""

        apply_input_quant: ClassVar[bool] = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return YES

        def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:  # noqa: N803
            rows, columns = self.weight_group_shape
            spread = Bs.repeat_interleave(rows, 0)[: len(B)].repeat_interleave(columns, 1)[:, : B.shape[1]]
            return linear(A, (B.float() * spread.float()).to(A.dtype))

    class Fp4(NvFp4LinearKernel):  # type: ignore[misc]
        """NVFP4; vLLM's own emulation would round the activations."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return YES

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            return YES

        def process_weights_after_loading(self, layer: Any) -> None:
            scales = layer.weight_scale.data.float() * layer.weight_global_scale.float()
            values = unpack_fp4(layer.weight.data)
            layer.numbers = (values.view(*scales.shape, GROUP) * scales[..., None]).view(values.shape)

        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return linear(x, layer.numbers.to(x.dtype), bias)

    class MxFp4(MxFp4LinearKernel):  # type: ignore[misc]
        """MXFP4: 32 values share a power of two."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return YES

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            return YES

        def process_weights_after_loading(self, layer: Any) -> None:
            scales = (layer.weight_scale.data.float() - 127).exp2()
            values = unpack_fp4(layer.weight.data)
            layer.numbers = (values.view(*scales.shape, 32) * scales[..., None]).view(values.shape)

        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return linear(x, layer.numbers.to(x.dtype), bias)

    tables = {
        "_POSSIBLE_INT8_KERNELS": Int8,
        "_POSSIBLE_FP8_KERNELS": Fp8,
        "_POSSIBLE_KERNELS": WholeNumbers,
        "_POSSIBLE_FP8_BLOCK_KERNELS": Blocks,
        "_POSSIBLE_NVFP4_KERNELS": Fp4,
        "_POSSIBLE_MXFP4_KERNELS": MxFp4,
    }
    for table, kernel in tables.items():
        known = getattr(kernels, table)
        monkeypatch.setitem(known, PlatformEnum.CPU, [kernel, *known.get(PlatformEnum.CPU, [])])
    # Parts of a fused product with scales of their own are rounded again, to the largest.
    monkeypatch.setattr("vllm._custom_ops.scaled_fp8_quant", _rounded)
    for module, name in CONFIGS:
        config = getattr(import_module(f"vllm.model_executor.layers.quantization.{module}"), name)
        monkeypatch.setattr(config, "get_supported_act_dtypes", classmethod(lambda _: FLOATS))
    # Weight-only NVFP4 asks for one class of kernel, whatever the tables say.
    monkeypatch.setattr(kernels, "MarlinNvFp4LinearKernel", Fp4)
