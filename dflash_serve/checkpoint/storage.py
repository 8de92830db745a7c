"""Storage of a drafter's quantised weights: the tensors that each quantiser writes for a module. No torch.

Layouts: ModelOpt's, compressed-tensors', Hugging Face's `quant_method: fp8`, GPTQ's and AWQ's. A weight is [out, in],
but [in, out] in GPTQ's and AWQ's files; a scale belongs to the tensor, to a row (channel), to neighbours along the
input (group), or to a block of rows and columns. (compressed-tensors 0.18 `compressors/*`, ModelOpt 0.47
`export/quant_utils.py`, vLLM 0.32 `quantization/fp8.py`, `auto_gptq.py`, `auto_awq.py`.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Format = Literal["fp8", "fp8-block", "int8", "w8a16", "w4a16", "nvfp4", "mxfp4", "mxfp8", "mixed"]
"""int8: weights and activations (W8A8). w8a16, w4a16: integers, weights alone. mixed: several formats, module by module
(ModelOpt's MIXED_PRECISION). The others are floats."""
Layout = Literal["modelopt", "compressed-tensors", "fp8", "gptq", "awq"]
"""Quantiser whose tensor names and configuration a checkpoint has; `fp8` is Hugging Face's `quant_method`."""
Strategy = Literal["tensor", "channel", "group", "block"]
FLOATS: Collection[str] = ("F64", "F32", "F16", "BF16")  # safetensors dtypes of plain weights
TURNED: Collection[Layout] = ("gptq", "awq")  # their weights are [in, out]
GROUPS: Mapping[str, int] = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
"""Values along the input that share a scale of the format."""
FP8_BLOCK = (128, 128)
WORD = 32  # bits of an integer into which compressed-tensors packs weights
TENSOR: Collection[str] = ("weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale")
"""Scales of a whole tensor, beside `weight_scale` where that is one, too."""
LEAVES: Collection[str] = (
    *("weight_packed", "weight_scale", "weight_scale_inv", "weight_shape", "weight_zero_point", "weight_g_idx"),
    *("input_zero_point", *TENSOR, "qweight", "qzeros", "scales", "g_idx"),
)
"""Names of all tensors that a quantised module may have beside `weight`."""
OPTIONAL = ("input_scale", "input_global_scale", "input_zero_point", "g_idx")
"""Absent where weights alone are quantised; g_idx also where columns are in the order of their groups."""
KV_SCALES = ("k_scale", "v_scale")  # scales of a quantised K/V cache, which belong to no weight


@dataclass(frozen=True)
class Leaf:
    """One tensor of a quantised module."""

    shape: tuple[int, ...]  # () = one number, of any rank
    dtypes: Collection[str]  # safetensors' names
    by_rows: bool = True  # fused products have the rows of their parts, one after another
    is_weight: bool = False  # weights have exactly this shape, scales may have further dimensions of 1

    def takes(self, shape: Sequence[int]) -> bool:
        """A tensor has this shape."""
        return tuple(shape) == self.shape or (not self.is_weight and _without_ones(shape) == _without_ones(self.shape))


@dataclass(frozen=True)
class Scheme:
    """Numbers and scales of a weight."""

    format: Format
    layout: Layout = "modelopt"
    strategy: Strategy = "tensor"
    group: int = 0  # columns that share a scale, of `group`
    block: tuple[int, int] = FP8_BLOCK  # rows and columns that share a scale, of `block`
    symmetric: bool = True
    ordered: bool = False  # columns belong to groups by weight_g_idx, or by g_idx
    zeros_less_one: bool = False  # GPTQ's first form stores each zero point less 1
    static_inputs: bool = False  # activations have a scale in the checkpoint
    weights_alone: bool = False  # of compressed-tensors' FP8: activations stay as they are

    @property
    def bits(self) -> int:
        """Bits of a number without its scale."""
        return 4 if self.format in ("w4a16", "nvfp4", "mxfp4") else 8

    @property
    def packs_words(self) -> bool:
        """Integers are packed into words of 32 bits."""
        return self.format in ("w4a16", "w8a16")

    @property
    def main(self) -> str:
        """The tensor that holds the numbers."""
        if self.layout in TURNED:
            return "qweight"
        packed = self.format in ("w4a16", "w8a16", "mxfp4") or (self.format, self.layout) == (
            "nvfp4",
            "compressed-tensors",
        )
        return "weight_packed" if packed else "weight"

    @property
    def scale(self) -> str:
        """The tensor that holds the scales nearest to the numbers."""
        if self.layout in TURNED:
            return "scales"
        return "weight_scale_inv" if (self.format, self.layout) == ("fp8-block", "fp8") else "weight_scale"

    @property
    def dtype(self) -> str:
        """safetensors' dtype of the numbers."""
        if self.packs_words:
            return "I32"
        return {"int8": "I8", "nvfp4": "U8", "mxfp4": "U8"}.get(self.format, "F8_E4M3")

    def tensors(self, rows: int, columns: int) -> dict[str, Leaf]:
        """Every tensor of a module whose weight is [rows, columns]."""
        if self.layout in TURNED:
            return self._turned(rows, columns)
        leaves = {
            self.main: Leaf((rows, self._stored(columns)), [self.dtype], is_weight=True),
            self.scale: self._scale(rows, columns),
        }
        if self.format == "nvfp4":
            name = "weight_scale_2" if self.layout == "modelopt" else "weight_global_scale"
            leaves[name] = Leaf((), FLOATS)
        if self.packs_words:
            leaves["weight_shape"] = Leaf((2,), ["I64", "I32"], by_rows=False)
        if not self.symmetric:
            leaves["weight_zero_point"] = self._zero_point(rows, columns)
        if self.ordered:
            leaves["weight_g_idx"] = Leaf((columns,), ["I32", "I64"], by_rows=False)
        if (self.format, self.layout) == ("nvfp4", "compressed-tensors"):
            leaves["input_global_scale"] = Leaf((), FLOATS)
        elif self.format in ("fp8", "nvfp4", "int8"):
            leaves["input_scale"] = Leaf((), FLOATS)
        if self.format == "int8":
            leaves["input_zero_point"] = Leaf((), ["I8"])
        return leaves

    def _turned(self, rows: int, columns: int) -> dict[str, Leaf]:
        # AWQ packs neighbouring rows into a word, GPTQ neighbouring columns; both pack zero points by rows.
        groups, packed_rows = self._groups(columns), _cells(rows * self.bits, WORD)
        numbers = (_cells(columns * self.bits, WORD), rows) if self.layout == "gptq" else (columns, packed_rows)
        leaves = {
            "qweight": Leaf(numbers, ["I32"], by_rows=False, is_weight=True),
            "scales": Leaf((groups, rows), FLOATS, by_rows=False),
            "qzeros": Leaf((groups, packed_rows), ["I32"], by_rows=False),
        }
        return leaves | ({"g_idx": Leaf((columns,), ["I32", "I64"], by_rows=False)} if self.layout == "gptq" else {})

    def _stored(self, columns: int) -> int:
        if self.packs_words:
            return _cells(columns * self.bits, WORD)
        return columns // 2 if self.bits == 4 else columns

    def _groups(self, columns: int) -> int:
        return _cells(columns, self.group or GROUPS.get(self.format, columns))

    def _scale(self, rows: int, columns: int) -> Leaf:
        if self.format in GROUPS:
            return Leaf((rows, self._groups(columns)), ["F8_E4M3" if self.format == "nvfp4" else "U8"])
        shapes: Mapping[Strategy, tuple[int, ...]] = {
            "tensor": (),
            "channel": (rows, 1),
            "group": (rows, self._groups(columns)),
            "block": (_cells(rows, self.block[0]), _cells(columns, self.block[1])),
        }
        return Leaf(shapes[self.strategy], FLOATS)

    def _zero_point(self, rows: int, columns: int) -> Leaf:
        groups = self._groups(columns) if self.strategy == "group" else 1
        if self.packs_words and self.strategy in ("group", "channel"):
            return Leaf((_cells(rows * self.bits, WORD), groups), ["I32"])
        return Leaf((rows, groups) if self.strategy != "tensor" else (), ["I8"])


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _cells(numbers: int, size: int) -> int:
    return -(-numbers // size)
