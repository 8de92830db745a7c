"""A decoder layer's small operators on a GPU, by three Triton kernels for PyTorch's many.

1. Residual add and RMSNorm. 2. The norms of q and k, their rotation, and the write of K/V into the cache. 3. SwiGLU.
All compute in float32 and round to the model's dtype where PyTorch's operators do: after the add, after each norm,
after the rotation and after SiLU. Only sums have another order, and exponentials another last bit. Nothing waits for
the device, and grids follow from shapes alone, so a CUDA graph can hold every launch.

This module imports `triton`, which CUDA builds of PyTorch bring, so it is imported for a model on a GPU alone
(`dflash_torch.engine.gpu_operators`). On a CPU Triton's interpreter ran the kernels and its compiler took them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from dflash_serve.checkpoint.config import TransformerConfig
from dflash_serve.models.attention import PaddedAttention, PlainOperators, ProjectedAttention
from dflash_serve.models.kv_cache import KVCache
from dflash_serve.models.layers import rotate

PER_WARP = 32 * 8  # a warp's 32 threads load 8 values each: 16 bytes of half precision, the widest load of a thread
MOST_WARPS = 16  # of one row's program: 4,096 columns at once; longer rows take several loads a thread
TILE = 4 * PER_WARP  # columns of a program of `_silu_product`
TOLERANCE = {torch.float32: 2.0**-17, torch.float16: 2.0**-7, torch.bfloat16: 2.0**-4}
"""Largest error, relative and absolute at values of about 1: 8 last bits in half precision, for a value whose norm was
rounded the other way before its rotation; 64 in float32, for sums of thousands of squares."""
UNEQUAL = 0.01
"""Largest share of values that differ at all in half precision. Other sums change one value in thousands, a rounding
that is left out or elsewhere changes one in ten."""


def _add_norm(
    h: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    adds: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    columns = tl.arange(0, block)  # one program a row
    inside = columns < size
    places = tl.program_id(0).to(tl.int64) * size + columns
    x = tl.load(h + places, inside, 0.0)
    if adds:
        x = (x.to(tl.float32) + tl.load(delta + places, inside, 0.0).to(tl.float32)).to(x.dtype)
        tl.store(total + places, x, inside)
    x = x.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x) / size + eps) * tl.load(weight + columns, inside, 0.0).to(tl.float32)
    tl.store(out + places, x.to(out.dtype.element_ty), inside)


def _silu_product(gate_up: tl.tensor, out: tl.tensor, size: tl.constexpr, block: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)  # one program a row and tile
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < size
    gate = tl.load(gate_up + 2 * row * size + columns, inside, 0.0)
    up = tl.load(gate_up + (2 * row + 1) * size + columns, inside, 0.0).to(tl.float32)
    x = gate.to(tl.float32)
    x = tl.div_rn(x, 1 + tl.exp(-x)).to(gate.dtype).to(tl.float32)
    tl.store(out + row * size + columns, (x * up).to(gate.dtype), inside)


def _rotate_and_store(
    qkv: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    entries: tl.tensor,
    positions: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    entry_size: tl.tensor,
    capacity: tl.tensor,
    eps: tl.tensor,
    norms: tl.constexpr,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)  # one program a row and head, of q, k and v in turn
    columns = tl.arange(0, block)
    inside = columns < half
    first = qkv + (row * (heads + 2 * kv_heads) + head) * 2 * half + columns
    low, high = tl.load(first, inside, 0.0).to(tl.float32), tl.load(first + half, inside, 0.0).to(tl.float32)
    stored, weight = queries + (row * heads + head) * 2 * half, q_weight
    if head >= heads:
        of_head = tl.load(entries + row) * entry_size + (head - heads) % kv_heads * capacity.to(tl.int64) * 2 * half
        stored, weight = keys + of_head + tl.load(positions + row) * 2 * half, k_weight
        if head >= heads + kv_heads:
            stored = values + of_head + tl.load(positions + row) * 2 * half
    if head < heads + kv_heads:
        if norms:
            scale = tl.rsqrt((tl.sum(low * low) + tl.sum(high * high)) / (2 * half) + eps)
            low = low * scale * tl.load(weight + columns, inside, 0.0).to(tl.float32)
            high = high * scale * tl.load(weight + half + columns, inside, 0.0).to(tl.float32)
            low, high = low.to(qkv.dtype.element_ty).to(tl.float32), high.to(qkv.dtype.element_ty).to(tl.float32)
        angles = row * 2 * half + columns
        turned = low * tl.load(cos + angles, inside, 0.0) + high * tl.load(sin + angles, inside, 0.0)
        high = high * tl.load(cos + angles + half, inside, 0.0) + low * tl.load(sin + angles + half, inside, 0.0)
        low = turned
    tl.store(stored + columns, low.to(qkv.dtype.element_ty), inside)
    tl.store(stored + columns + half, high.to(qkv.dtype.element_ty), inside)


KERNELS = {kernel.__name__: triton.jit(kernel) for kernel in (_add_norm, _silu_product, _rotate_and_store)}


def launch(name: str, grid: tuple[int, ...], *arguments: Any, warps: int, **constants: Any) -> None:
    """Launches a kernel over a grid of programs."""
    KERNELS[name][grid](*arguments, **constants, num_warps=warps)


class TritonAttention(PaddedAttention, ProjectedAttention):
    """Padded attention whose projected rows one kernel norms, rotates and stores."""

    def rotated(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, qk_norm: Sequence[nn.RMSNorm] | None
    ) -> Tensor:
        return self.read(layer, self.store(layer, qkv, cos, sin, qk_norm)).flatten(1)

    def store(self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, qk_norm: Sequence[nn.RMSNorm] | None) -> Tensor:
        """Stores the K/V of projected rows, as `rotated` takes them; returns q [rows, heads, head_dim], rotated."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        _, kv_heads, capacity, dim = keys.shape
        heads = qkv.shape[1] // dim - 2 * kv_heads
        queries = qkv.new_empty(len(qkv), heads, dim)
        weights = (qkv, qkv) if qk_norm is None else (qk_norm[0].weight, qk_norm[1].weight)  # qkv: is not read
        # Entries of one-row blocks are a column of a table.
        places = (self.row_entries.contiguous(), self.row_positions.contiguous())
        launch(
            "_rotate_and_store",
            (len(qkv), heads + 2 * kv_heads),
            *(qkv, *weights, cos, sin, *places, queries, keys, values, keys.stride(0), capacity),
            0.0 if qk_norm is None else qk_norm[0].eps,
            norms=qk_norm is not None,
            heads=heads,
            kv_heads=kv_heads,
            half=dim // 2,
            block=triton.next_power_of_2(dim // 2),
            warps=1,
        )
        return queries


class TritonOperators(PlainOperators):
    """Operators of a model on a GPU; tensors must be contiguous, as linear layers return them. Not differentiable."""

    name = "triton"
    kernels = f"triton {triton.__version__}"
    padded = TritonAttention

    def add_norm(self, h: Tensor, delta: Tensor | None, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
        (rows, size), out = h.shape, torch.empty_like(h)
        total, added = (h, h) if delta is None else (torch.empty_like(h), delta)  # h: is not read
        block = triton.next_power_of_2(size)
        warps = max(1, min(MOST_WARPS, block // PER_WARP))
        tensors, adds = (h, added, norm.weight, total, out), delta is not None
        launch("_add_norm", (rows,), *tensors, norm.eps, adds=adds, size=size, block=block, warps=warps)
        return total, out

    def silu_product(self, gate_up: Tensor) -> Tensor:
        rows, size = len(gate_up), gate_up.shape[1] // 2
        out, grid = gate_up.new_empty(rows, size), (rows, triton.cdiv(size, TILE))
        launch("_silu_product", grid, gate_up, out, size=size, block=TILE, warps=TILE // PER_WARP)
        return out


def difference(config: TransformerConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Compares each kernel with PyTorch's operators on a few random rows of a model's sizes; waits for the device.

    Returns:
        The first result that differs by more than sums in another order do; None if there is none.
    """
    with torch.inference_mode():
        for name, found, expected in _compared(config, dtype, device):
            error, allowed = (found.float() - expected.float()).abs(), TOLERANCE[dtype] * (1 + expected.float().abs())
            unequal = 0.0 if dtype == torch.float32 else (found != expected).float().mean().item()
            if not (error <= allowed).all().item() or unequal > UNEQUAL:
                return f"{name} differs from PyTorch's in {dtype} on {device}"
    return None


def _compared(
    config: TransformerConfig, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor, Tensor]]:  # what is computed, by Triton and by PyTorch
    generator, rows = torch.Generator(device).manual_seed(0), 3

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def norm(size: int) -> nn.RMSNorm:
        made = nn.RMSNorm(size, config.rms_norm_eps, device=device, dtype=dtype)
        made.weight.copy_(random(size))
        return made

    ours, plain = TritonOperators(), PlainOperators()
    h, delta, before = random(rows, config.hidden_size), random(rows, config.hidden_size), norm(config.hidden_size)
    for added in (None, delta):
        for found, expected in zip(ours.add_norm(h, added, before), plain.add_norm(h, added, before), strict=True):
            yield "the sum or its norm", found, expected
    gate_up = random(rows, 2 * config.intermediate_size)
    yield "SwiGLU", ours.silu_product(gate_up), plain.silu_product(gate_up)
    dim, kv_heads = config.head_dim, config.num_key_value_heads
    heads = [config.num_attention_heads, kv_heads, kv_heads]
    qkv, angles = random(rows, sum(heads) * dim), random(rows, 1, dim).float()
    cos, sin, places = angles.cos(), angles.sin(), torch.arange(1, 1 + rows, device=device)
    for qk_norm in (None, (norm(dim), norm(dim))):
        mine, theirs = (
            KVCache(layers=1, entries=2, kv_heads=kv_heads, capacity=1 + rows, head_dim=dim, dtype=dtype, device=device)
            for _ in range(2)
        )
        for values in (mine.keys, mine.values, theirs.keys, theirs.values):
            values.zero_()  # a CPU's are not initialised, and all rows are compared
        entry = torch.ones(1, dtype=torch.int64, device=device)
        attention = TritonAttention(mine, entry, places[None], 1 + rows, config.layers[:1], heads[0])
        queries = attention.store(0, qkv, cos, sin, qk_norm)
        q, k, v = qkv.view(rows, -1, dim).split(heads, dim=1)
        q, k = (q, k) if qk_norm is None else (qk_norm[0](q), qk_norm[1](k))
        theirs.write_rows(0, entry.expand(rows), places, rotate(k, cos, sin), v)
        yield "the rotation of queries", queries, rotate(q, cos, sin)
        yield "a key in the cache", mine.keys, theirs.keys
        yield "a value in the cache", mine.values, theirs.values
