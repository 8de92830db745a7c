"""Quantised weights: decoding of every format that drafters are stored in, encoding of FP8 and NVFP4, in plain PyTorch.

FP8 (E4M3): w = q * s, with one s for the tensor, a row or a block; `quantize` takes s = max|w| / 448 of the tensor.
Integers: w = (q - z) * s, with one s for the tensor, a row or a group of neighbours along the input; z is often 0.
NVFP4: 16 neighbours along the input share a scale b in E4M3, the tensor a scale g in fp32: w = q * b * g, q in E2M1,
two to a byte with the lower index in the low nibble, g = max|w| / (6 * 448).
MXFP4, MXFP8: 32 neighbours share a power of two, stored as its exponent + 127; MXFP8's numbers are E4M3.
(ModelOpt 0.47 `NVFP4QTensor` and `FP8QTensor`, compressed-tensors 0.18 `compressors/*`; tests hold these against both.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_serve.checkpoint.storage import FP8_BLOCK, GROUPS, TURNED, WORD, Scheme
from dflash_serve.checkpoint.storage import Format as Format

FP8_MAX, FP4_MAX = 448.0, 6.0
GROUP = 16  # values that share an NVFP4 block scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of FP4 codes by their lower three bits; the fourth bit is the sign."""
MX_BIAS = 127  # of the exponents that are MXFP4's and MXFP8's scales
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # places in a word of AWQ's of the numbers 0, 1, 2, ... (AutoAWQ's `gemm`)


@dataclass(frozen=True)
class QuantizedTensor:
    """A weight [out, in] as stored, with its scales."""

    format: Format
    values: Tensor  # FP8: float8_e4m3fn [out, in]. Integers: int8 [out, in]. NVFP4, MXFP4: uint8 [out, in / 2]
    scale: Tensor  # Of the tensor [], of rows [out, 1], of groups [out, groups], or of blocks; NVFP4: E4M3, MX: uint8
    scale_2: Tensor | None = None  # NVFP4: of the tensor, in fp32, or fp64 where the files have its reciprocal
    input_scale: Tensor | None = None  # fp32, of the activations; None = only the weights are quantised
    zero_point: Tensor | None = None  # integers: whole numbers, in the shape of the scale; None = 0
    order: Tensor | None = None  # integers: group of each column [in]; None = neighbours
    block: tuple[int, int] = FP8_BLOCK  # FP8 by block: its rows and columns

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the dequantised weight."""
        rows, columns = self.values.shape
        return rows, columns * (2 if self.format in ("nvfp4", "mxfp4") else 1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] that an engine multiplies with."""
        if self.format in ("nvfp4", "mxfp4"):
            scales = self.scale.float()
            if self.format == "mxfp4":
                scales = torch.exp2(scales - MX_BIAS)
            elif self.scale_2 is not None:
                scales = scales * self.scale_2.float()
            blocks = unpack_fp4(self.values).view(self.shape[0], scales.shape[1], -1)
            return (blocks * scales[..., None]).view(self.shape).to(dtype)
        values = self.values.float()
        if self.zero_point is not None:
            values = values - self.spread(self.zero_point.float())
        scale = torch.exp2(self.scale.float() - MX_BIAS) if self.format == "mxfp8" else self.scale.float()
        return (values * self.spread(scale)).to(dtype)

    def spread(self, scale: Tensor) -> Tensor:
        """A scale, or a zero point, for every value; [] and [out, 1] stay as they are."""
        if scale.dim() < 2 or (scale.shape[1] == 1 and self.format != "fp8-block"):
            return scale
        rows, columns = self.shape
        if self.format == "fp8-block":
            high, wide = self.block
            return scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        if self.order is not None:
            return scale[:, self.order.long()]
        return scale.repeat_interleave(-(-columns // scale.shape[1]), 1)[:, :columns]

    def rows(self, start: int, stop: int) -> QuantizedTensor:
        """Output rows [start, stop): a column-parallel shard. Per-tensor scales stay."""
        assert self.format in ("fp8", "nvfp4")
        scale = self.scale if self.scale.dim() == 0 else self.scale[start:stop]
        return QuantizedTensor(self.format, self.values[start:stop], scale, self.scale_2, self.input_scale)

    def columns(self, start: int, stop: int) -> QuantizedTensor:
        """Input columns [start, stop): a row-parallel shard.

        Raises:
            ValueError: NVFP4 blocks would be cut.
        """
        assert self.format in ("fp8", "nvfp4")
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


def quantized_tensor(scheme: Scheme, leaves: Mapping[str, Tensor]) -> QuantizedTensor:
    """A weight, from the tensors that its module has in a checkpoint (`Scheme.tensors`)."""
    if scheme.layout in TURNED:
        return _turned_back(scheme, leaves)
    values, zero_point = leaves[scheme.main], leaves.get("weight_zero_point")
    scale = leaves[scheme.scale]
    rows = len(values)
    scale = scale.reshape(rows, -1) if scheme.strategy in ("channel", "group") or scheme.format in GROUPS else scale
    scale = scale.reshape(()) if scale.numel() == 1 and scheme.strategy == "tensor" else scale
    if scheme.packs_words:
        columns = int(leaves["weight_shape"].flatten()[-1])
        values = unpack_words(values, scheme.bits, columns)
        if zero_point is not None and zero_point.dtype == torch.int32:
            zero_point = unpack_words(zero_point, scheme.bits, rows, dim=0)
    scale_2, input_scale = leaves.get("weight_scale_2"), leaves.get("input_scale")
    if scheme.layout == "compressed-tensors" and scheme.format == "nvfp4":  # its global scales are divisors
        scale_2, given = leaves["weight_global_scale"].double().reciprocal(), leaves.get("input_global_scale")
        input_scale = None if given is None else given.double().reciprocal()
    return QuantizedTensor(
        scheme.format,
        values,
        scale,
        None if scale_2 is None else scale_2.reshape(()),
        None if input_scale is None else input_scale.reshape(()),
        None if zero_point is None else zero_point.reshape(scale.shape),
        leaves.get("weight_g_idx"),
        scheme.block,
    )


def _turned_back(scheme: Scheme, leaves: Mapping[str, Tensor]) -> QuantizedTensor:
    # GPTQ's and AWQ's: [in, out], and zero points that are 2^(bits - 1) for symmetric weights.
    scale, bits = leaves["scales"].t().contiguous(), scheme.bits
    zeros = unpack_words(leaves["qzeros"], bits, scale.shape[0]).to(torch.int16)
    if scheme.layout == "awq":
        values = _in_awq_order(unpack_words(leaves["qweight"], bits, scale.shape[0]))
        zeros = _in_awq_order(zeros)
    else:
        columns = leaves["qweight"].shape[0] * WORD // bits
        values = unpack_words(leaves["qweight"], bits, columns, dim=0)
    zero_point, order = zeros.t() + (1 if scheme.zeros_less_one else 0), leaves.get("g_idx")
    if order is not None and torch.equal(order.long(), torch.arange(len(order)) // (scheme.group or len(order))):
        order = None  # the columns are in the order of their groups
    kept = zero_point.contiguous() if zero_point.any() else None
    return QuantizedTensor(scheme.format, values.t().contiguous(), scale, zero_point=kept, order=order)


def _in_awq_order(rows: Tensor) -> Tensor:
    found: Tensor = rows.unflatten(1, (-1, len(AWQ_ORDER)))[..., list(AWQ_ORDER)].flatten(1)
    return found


def stored_tensors(scheme: Scheme, weight: QuantizedTensor) -> dict[str, Tensor]:
    """The tensors of a module in a checkpoint, by their names in it: the reverse of `quantized_tensor`."""
    values, zero_point = weight.values, weight.zero_point
    found: dict[str, Tensor] = {}
    if scheme.packs_words:
        found["weight_shape"] = torch.tensor(weight.shape)
        values = pack_words(values, scheme.bits)
        if zero_point is not None and scheme.strategy != "tensor":
            zero_point = pack_words(zero_point, scheme.bits, dim=0)
    scale = weight.scale.flatten() if (scheme.layout, scheme.strategy) == ("modelopt", "channel") else weight.scale
    found |= {scheme.main: values, scheme.scale: scale}
    of_tensor = {"weight_scale_2": weight.scale_2, "input_scale": weight.input_scale}
    if scheme.layout == "compressed-tensors" and scheme.format == "nvfp4":
        of_tensor = {"weight_global_scale": weight.scale_2, "input_global_scale": weight.input_scale}
        of_tensor = {name: None if one is None else one.double().reciprocal() for name, one in of_tensor.items()}
    of_tensor = {name: None if one is None else one.float() for name, one in of_tensor.items()}
    if scheme.layout == "compressed-tensors":  # it has no tensors without dimensions
        of_tensor = {name: None if one is None else one.reshape(1) for name, one in of_tensor.items()}
        found[scheme.scale] = weight.scale.reshape(1) if weight.scale.dim() == 0 else weight.scale
    others = {**of_tensor, "weight_zero_point": zero_point, "weight_g_idx": weight.order}
    return {**found, **{name: tensor for name, tensor in others.items() if tensor is not None}}


Weight = Tensor | QuantizedTensor  # a stored weight of a checkpoint, plain or quantised


def dequantized(weights: Mapping[str, Weight], dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights as plain tensors, quantised ones decoded."""
    return {
        name: weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight.to(dtype)
        for name, weight in weights.items()
    }


def quantize(
    weight: Tensor,
    format: Format,
    input_scale: Tensor | None = None,
    *,
    of_tensor: Tensor | None = None,
    group: int = 0,
) -> QuantizedTensor:
    """Encodes a weight [out, in]; or activations [rows, in], by the static scale `of_tensor` (FP8, NVFP4).

    Integers are symmetric, with a scale for each row, or for each `group` of neighbours along the input.

    Args:
        weight: of any float dtype.
        format: of the result.
        input_scale: of its activations, kept.
        of_tensor: the scale that the whole tensor shares; None = from its largest value.
        group: columns that share a scale of integers; 0 = a whole row.

    Raises:
        ValueError: an input size that the groups do not divide.
    """
    weight = weight.float()
    least = torch.finfo(torch.float32).tiny
    largest = weight.abs().max().clamp(min=least)
    if format == "fp8":
        scale = largest / FP8_MAX if of_tensor is None else of_tensor
        values = (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        return QuantizedTensor("fp8", values, scale, None, input_scale)
    if format == "fp8-block":
        return _fp8_blocks(weight)
    size = GROUPS.get(format, group or weight.shape[1])
    if weight.shape[1] % size:
        raise ValueError(f"{format.upper()} needs an input size that is a multiple of {size}, not {weight.shape[1]}")
    blocks = weight.view(len(weight), -1, size)
    most = blocks.abs().amax(dim=-1)
    if format in ("int8", "w8a16", "w4a16"):
        top = 2.0 ** ((4 if format == "w4a16" else 8) - 1)
        scale = most.clamp(min=least) / (top - 0.5)
        values = (blocks / scale[..., None]).round().clamp(-top, top - 1).to(torch.int8)
        return QuantizedTensor(format, values.view(weight.shape), scale, None, input_scale)
    if format == "mxfp4":
        exponent = torch.log2(most.clamp(min=least) / FP4_MAX).ceil().clamp(-MX_BIAS, MX_BIAS)
        values = pack_fp4((blocks / torch.exp2(exponent)[..., None]).view(weight.shape))
        return QuantizedTensor("mxfp4", values, (exponent + MX_BIAS).to(torch.uint8))
    scale_2 = largest / (FP4_MAX * FP8_MAX) if of_tensor is None else of_tensor
    scale = (most / (FP4_MAX * scale_2)).clamp(max=FP8_MAX).to(torch.float8_e4m3fn)
    step = scale.float() * scale_2
    scaled = torch.where(step[..., None] > 0, blocks / step[..., None], torch.zeros_like(blocks))
    return QuantizedTensor("nvfp4", pack_fp4(scaled.view(weight.shape)), scale, scale_2, input_scale)


def _fp8_blocks(weight: Tensor) -> QuantizedTensor:
    high, wide = FP8_BLOCK
    rows, columns = weight.shape
    whole = torch.nn.functional.pad(weight.abs(), (0, -columns % wide, 0, -rows % high))
    most = whole.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).amax(dim=(1, 3))
    found = QuantizedTensor("fp8-block", weight, most.clamp(min=torch.finfo(torch.float32).tiny) / FP8_MAX)
    values = (weight / found.spread(found.scale)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return replace(found, values=values)


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


def unpack_words(packed: Tensor, bits: int, count: int, dim: int = 1) -> Tensor:
    """Integers of compressed-tensors, packed along `dim` into int32 with the first lowest -> int8, `count` of them.

    A number n is stored as n + 2^(bits - 1).
    """
    moved = packed.movedim(dim, -1)
    shifts = torch.arange(0, WORD, bits, device=packed.device, dtype=torch.int32)
    numbers = ((moved[..., None] >> shifts) & (2**bits - 1)) - 2 ** (bits - 1)
    found: Tensor = numbers.flatten(-2)[..., :count].to(torch.int8).movedim(-1, dim)
    return found


def pack_words(values: Tensor, bits: int, dim: int = 1) -> Tensor:
    """The reverse of `unpack_words`; the last word is filled with zeros."""
    moved = values.movedim(dim, -1).to(torch.int32) + 2 ** (bits - 1)
    factor = WORD // bits
    moved = torch.nn.functional.pad(moved, (0, -moved.shape[-1] % factor))
    shifts = torch.arange(0, WORD, bits, device=values.device, dtype=torch.int32)
    words: Tensor = (moved.unflatten(-1, (-1, factor)) << shifts).sum(-1, dtype=torch.int32)
    return words.movedim(-1, dim).contiguous()


def relative_error(original: Tensor, approximation: Tensor) -> float:
    """|a - b| / |a| in the Frobenius norm; 0 if `original` is zero."""
    norm = float(original.float().norm())
    return float((approximation.float() - original.float()).norm()) / norm if norm else 0.0
