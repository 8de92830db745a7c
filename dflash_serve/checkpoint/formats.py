"""FP8 and NVFP4 weights: encoding, decoding and their error, in plain PyTorch.

FP8 (E4M3): w = q * s, one s for the tensor, s = max|w| / 448.
NVFP4: 16 neighbours along the input share a scale b in E4M3, the tensor a scale g in fp32: w = q * b * g, q in E2M1,
two to a byte with the lower index in the low nibble, g = max|w| / (6 * 448). (ModelOpt 0.47 `NVFP4QTensor` and
`FP8QTensor`; a test holds these against ModelOpt's own output.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

FP8_MAX, FP4_MAX = 448.0, 6.0
GROUP = 16  # values that share an NVFP4 block scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of FP4 codes by their lower three bits; the fourth bit is the sign."""

Format = Literal["fp8", "nvfp4"]


@dataclass(frozen=True)
class QuantizedTensor:
    """A weight [out, in] as stored, with its scales."""

    format: Format
    values: Tensor  # FP8: float8_e4m3fn [out, in]. NVFP4: uint8 [out, in / 2]
    scale: Tensor  # FP8: fp32, of the tensor. NVFP4: float8_e4m3fn [out, in / 16]
    scale_2: Tensor | None = None  # NVFP4: fp32, of the tensor
    input_scale: Tensor | None = None  # fp32, of the activations; None = only the weights are quantised

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the dequantised weight."""
        rows, columns = self.values.shape
        return rows, columns * (2 if self.format == "nvfp4" else 1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] that an engine multiplies with."""
        if self.format == "fp8":
            return (self.values.float() * self.scale.float()).to(dtype)
        assert self.scale_2 is not None
        blocks = unpack_fp4(self.values).view(self.shape[0], -1, GROUP)
        scales = self.scale.float() * self.scale_2.float()
        return (blocks * scales[..., None]).view(self.shape).to(dtype)

    def rows(self, start: int, stop: int) -> QuantizedTensor:
        """Output rows [start, stop): a column-parallel shard. Per-tensor scales stay."""
        scale = self.scale if self.format == "fp8" else self.scale[start:stop]
        return QuantizedTensor(self.format, self.values[start:stop], scale, self.scale_2, self.input_scale)

    def columns(self, start: int, stop: int) -> QuantizedTensor:
        """Input columns [start, stop): a row-parallel shard.

        Raises:
            ValueError: NVFP4 blocks would be cut.
        """
        if self.format == "fp8":
            return QuantizedTensor("fp8", self.values[:, start:stop], self.scale, None, self.input_scale)
        if start % GROUP or stop % GROUP:
            raise ValueError(f"columns {start}..{stop} cut an NVFP4 block of {GROUP}")
        values, scale = self.values[:, start // 2 : stop // 2], self.scale[:, start // GROUP : stop // GROUP]
        return QuantizedTensor("nvfp4", values, scale, self.scale_2, self.input_scale)

    def state(self, name: str) -> dict[str, Tensor]:
        """Tensors to store for the module `name`, under ModelOpt's names: weight, weight_scale, weight_scale_2, ..."""
        found = {"weight": self.values, "weight_scale": self.scale, "weight_scale_2": self.scale_2}
        found["input_scale"] = self.input_scale
        return {f"{name}.{key}": tensor for key, tensor in found.items() if tensor is not None}


Weight = Tensor | QuantizedTensor  # a stored weight of a checkpoint, plain or quantised


def dequantized(weights: Mapping[str, Weight], dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights as plain tensors, quantised ones decoded."""
    return {
        name: weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight.to(dtype)
        for name, weight in weights.items()
    }


def quantize(
    weight: Tensor, format: Format, input_scale: Tensor | None = None, *, of_tensor: Tensor | None = None
) -> QuantizedTensor:
    """Encodes a weight [out, in] in FP8 or NVFP4; or activations [rows, in], by the static scale `of_tensor`.

    Args:
        of_tensor: the scale that the whole tensor shares; None = from its largest value.

    Raises:
        ValueError: NVFP4 of a weight whose input size is not a multiple of 16.
    """
    weight = weight.float()
    largest = weight.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    if format == "fp8":
        scale = largest / FP8_MAX if of_tensor is None else of_tensor
        values = (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        return QuantizedTensor("fp8", values, scale, None, input_scale)
    if weight.shape[1] % GROUP:
        raise ValueError(f"NVFP4 needs an input size that is a multiple of {GROUP}, not {weight.shape[1]}")
    scale_2 = largest / (FP4_MAX * FP8_MAX) if of_tensor is None else of_tensor
    blocks = weight.view(len(weight), -1, GROUP)
    scale = (blocks.abs().amax(dim=-1) / (FP4_MAX * scale_2)).clamp(max=FP8_MAX).to(torch.float8_e4m3fn)
    step = scale.float() * scale_2
    scaled = torch.where(step[..., None] > 0, blocks / step[..., None], torch.zeros_like(blocks))
    return QuantizedTensor("nvfp4", pack_fp4(scaled.view(weight.shape)), scale, scale_2, input_scale)


def pack_fp4(values: Tensor) -> Tensor:
    """Nearest E2M1 of fp32 values [out, in], ties to the even code, two to a byte: uint8 [out, in / 2]."""
    magnitude = values.abs().clamp(max=FP4_MAX)
    levels = torch.tensor(E2M1, device=values.device)
    middles = (levels[1:] + levels[:-1]) / 2
    code = torch.bucketize(magnitude, middles)
    # A value in the middle belongs to the even one of its two codes; bucketize gives the lower.
    tie = (code < len(middles)) & (magnitude == middles[code.clamp(max=len(middles) - 1)]) & (code % 2 == 1)
    nibble = (code + tie) | (torch.signbit(values).long() << 3)
    return (nibble[:, 0::2] | (nibble[:, 1::2] << 4)).to(torch.uint8)


def unpack_fp4(packed: Tensor) -> Tensor:
    """uint8 [out, in / 2] -> fp32 [out, in]."""
    levels = torch.tensor([*E2M1, *(-level for level in E2M1)], device=packed.device)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).view(len(packed), -1)
    return levels[codes.long()]


def relative_error(original: Tensor, approximation: Tensor) -> float:
    """|a - b| / |a| in the Frobenius norm; 0 if `original` is zero."""
    norm = float(original.float().norm())
    return float((approximation.float() - original.float()).norm()) / norm if norm else 0.0
