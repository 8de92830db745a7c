"""Layers of drafter and target: rotary embedding, operators, and linear layers laid out for a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from dflash_serve.checkpoint.config import RopeConfig
from dflash_serve.models.compiled.build import kernel, load_kernels

ROWS_HINT = 8
"""Row count for which oneDNN chooses a layout: a block. The layout is also good for 1 row and for a prefill."""
BLOCK = 16  # outputs that `compiled/linear.cpp` stores side by side
PER_WORD = {torch.float32: 1, torch.bfloat16: 2}  # dtype -> inputs that `compiled/linear.cpp` reads at once
Module = TypeVar("Module", bound=nn.Module)


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_position_embeddings: int) -> tuple[Tensor, float]:
    """The inverse frequencies [head_dim/2] in fp32, and the factor on cos and sin (1 but for YaRN and longrope).

    The scaling formulas are transformers' own.
    """
    if rope.scaling is None:
        return rope.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim), 1.0
    # Imported here: transformers costs seconds, and plain RoPE does not need it.
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = PretrainedConfig(
        rope_parameters=rope.parameters,
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=max_position_embeddings,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope.scaling](config, torch.device("cpu"))
    return frequencies.float(), float(factor)


class RotaryEmbedding(nn.Module):
    """Positions [rows] -> (cos, sin), each [rows, 1, head_dim] in fp32 (bf16 positions beyond 256 would collide).

    `sin` carries the sign of the half-split rotation, so that `rotate` is one roll and one fused multiply-add. A
    decoding step on a CPU consists of tiny operations, so each one saved in every layer counts.
    """

    inverse_frequency: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, max_position_embeddings: int) -> None:
        super().__init__()
        with torch.device("cpu"):  # even when the weights are built on the meta device
            frequencies, self.factor = inverse_frequencies(rope, head_dim, max_position_embeddings)
        self.register_buffer("inverse_frequency", frequencies, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = (positions[:, None].float() * self.inverse_frequency)[:, None]
        cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [rows, heads, head_dim]: halves (a, b) -> (a cos - b sin, b cos + a sin), Llama's and Qwen's form."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)


class CompiledLinear(nn.Module):
    """x [rows, in] -> [rows, out] at the speed of reading the weights; a row's result does not depend on other rows.

    float32 weights whose values are all bfloat16 numbers (most checkpoints) are stored in bfloat16: half the bytes and
    equal products. x has the layer's dtype. Inference only.

    Args:
        linear: a layer on a CPU that `compiled_linear` accepts.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        library = load_kernels()
        assert library is not None
        weight = linear.weight.detach().contiguous()
        self.dtype, (self.outputs, self.inputs) = weight.dtype, weight.shape
        self.bias = None if linear.bias is None else linear.bias.detach().contiguous()
        narrow = weight.bfloat16()
        if self.inputs % PER_WORD[torch.bfloat16] == 0 and torch.equal(narrow.to(self.dtype), weight):
            weight = narrow
        self.packed = weight.new_empty(-(-self.outputs // BLOCK) * BLOCK * self.inputs)
        pack = kernel(library, f"pack_{_name(weight.dtype)}", "ppll")
        pack(weight.data_ptr(), self.packed.data_ptr(), self.inputs, self.outputs)
        self._run = kernel(library, f"linear_{_name(self.dtype)}_by_{_name(weight.dtype)}", "ppppllli")

    def __deepcopy__(self, memo: object) -> CompiledLinear:  # its weights are never written
        return self

    @property
    def weight(self) -> Tensor:
        """A copy of the original weight [out, in]."""
        words = self.packed.view(torch.int32).view(-1, self.inputs // PER_WORD[self.packed.dtype], BLOCK)
        rows = words.transpose(1, 2).reshape(-1)[: self.outputs * words.shape[1]]
        return rows.view(self.packed.dtype).view(self.outputs, self.inputs).to(self.dtype, copy=True)

    def rounded(self) -> CompiledLinear:
        """A layer with weights rounded to bfloat16: half of float32's bytes; itself if they are, or cannot be."""
        if self.packed.dtype == torch.bfloat16 or self.inputs % PER_WORD[torch.bfloat16]:
            return self
        linear = nn.Linear(self.inputs, self.outputs, bias=self.bias is not None, device="meta")
        linear.weight = nn.Parameter(self.weight.bfloat16().to(self.dtype), requires_grad=False)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias, requires_grad=False)
        return CompiledLinear(linear)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.dtype or x.shape[-1] != self.inputs:
            raise ValueError(f"rows of {x.shape[-1]} {x.dtype} for a layer of {self.inputs} {self.dtype}")
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.outputs)
        bias = None if self.bias is None else self.bias.data_ptr()
        rows, threads = x.numel() // self.inputs, torch.get_num_threads()
        self._run(x.data_ptr(), self.packed.data_ptr(), bias, out.data_ptr(), rows, self.inputs, self.outputs, threads)
        return out


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compiled_linear(linear: nn.Linear) -> CompiledLinear | None:
    """A CPU's layer in our layout, if the kernels can be compiled.

    None for other dtypes, for an input size that does not fill whole words, and in bfloat16 where oneDNN uses the CPU's
    matrix units (AMX), which our kernels do not.
    """
    dtype = linear.weight.dtype
    if dtype not in PER_WORD or linear.in_features % PER_WORD[dtype] or load_kernels() is None:
        return None
    if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() and _onednn_packs(dtype):
        return None
    return CompiledLinear(linear)


class PackedLinear(nn.Module):
    """x [rows, in] -> [rows, out] with weights in oneDNN's blocked layout: 8 rows take about the time of one.

    PyTorch's plain CPU path picks a poor kernel for 4-16 rows, which are the widths that speculation verifies. Used for
    layers that `CompiledLinear` cannot take. Inference only.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS_HINT)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out


def pack_linear(linear: nn.Module, *, compiled: bool = True) -> nn.Module:
    """A CPU's nn.Linear in the best available layout: ours, oneDNN's, or unchanged.

    Args:
        compiled: our layout is allowed.
    """
    if not isinstance(linear, nn.Linear) or linear.weight.device.type != "cpu":
        return linear
    found = compiled_linear(linear) if compiled else None
    return found or (PackedLinear(linear) if _onednn_packs(linear.weight.dtype) else linear)


def _onednn_packs(dtype: torch.dtype) -> bool:
    # oneDNN does not pack bfloat16 on a CPU without AVX-512 or AVX-NE-CONVERT.
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def rounded(linear: nn.Module) -> nn.Module:
    """The layer with bfloat16 weights if these are read faster: for results that need not be exact, such as drafts."""
    return linear.rounded() if isinstance(linear, CompiledLinear) else linear


def dense_weight(linear: nn.Module) -> Tensor:
    """A layer's weight [out, in] before any packing."""
    weight = linear.weight
    assert isinstance(weight, Tensor)
    return weight.to_dense() if weight.is_mkldnn else weight.detach()


def pack_linears(module: nn.Module, *, compiled: bool = True) -> None:
    """Packs every nn.Linear below `module`, in place."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, pack_linear(child, compiled=compiled))
        else:
            pack_linears(child, compiled=compiled)


def stack_linears(linears: list[nn.Linear]) -> nn.Linear:
    """Joins linear layers of one input into one layer with their outputs side by side."""
    outputs = sum(linear.out_features for linear in linears)
    joined = nn.Linear(linears[0].in_features, outputs, bias=False, device="meta")
    joined.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if linears[0].bias is not None:
        joined.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    return joined


def as_module_list(items: Iterable[Module]) -> Sequence[Module]:
    """An nn.ModuleList, typed as a sequence of its modules."""
    return cast(Sequence[Module], nn.ModuleList(items))
