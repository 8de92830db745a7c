"""What the drafter computes with: quantised products, cut over ranks, and attention over the worker's context arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_serve.checkpoint.config import AttentionKind
from dflash_serve.checkpoint.formats import FP8_MAX, QuantizedTensor, Weight

Reduce = Callable[[Tensor], Tensor]
EVERYTHING = (-1, -1)
"""flash-attn's window_size of a layer without a window."""


class Product(nn.Module):
    """x @ weights^T for weights stacked along their rows.

    FP8 weights with an input scale are multiplied as FP8, and each stacked part's own scale is applied to its columns
    of the result: that is what upstream's fused K/V product leaves out. NVFP4, and FP8 without an input scale, are
    decoded once and multiplied in `dtype`.

    Args:
        weights: parts [out, in], all of one kind.
        bias: of all parts together.
        dtype: of activations and results.
    """

    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None
    input_scale: Tensor | None

    def __init__(self, weights: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        fp8 = [w for w in weights if isinstance(w, QuantizedTensor) and w.format == "fp8" and w.input_scale is not None]
        scales = input_scale = None
        if fp8 and len(fp8) == len(weights):
            stacked = torch.cat([w.values for w in fp8])
            scales = torch.cat([w.scale.float().reshape(1).expand(len(w.values)) for w in fp8])
            inputs = [w.input_scale.float().reshape(()) for w in fp8 if w.input_scale is not None]
            input_scale = torch.stack(inputs).max()
        else:
            plain = [w.dequantize(dtype) if isinstance(w, QuantizedTensor) else w.to(dtype) for w in weights]
            stacked = plain[0] if len(plain) == 1 else torch.cat(plain)
        self.register_buffer("weight", stacked.contiguous())
        self.register_buffer("scales", scales)
        self.register_buffer("input_scale", input_scale)
        self.register_buffer("bias", None if bias is None else bias.to(dtype))
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        if self.scales is None or self.input_scale is None:
            return F.linear(x, self.weight, self.bias)
        rounded = (x.float() / self.input_scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        one = torch.ones_like(self.input_scale)
        y = torch._scaled_mm(rounded, self.weight.t(), scale_a=self.input_scale, scale_b=one, out_dtype=torch.float32)
        y = (y * self.scales).to(self.dtype)
        return y if self.bias is None else y + self.bias


class RowParallel(nn.Module):
    """A product over this rank's share of the input; the ranks' results are added, and the bias once."""

    bias: Tensor | None

    def __init__(self, product: Product, reduce: Reduce | None) -> None:
        super().__init__()
        self.product, self.reduce = product, reduce
        self.register_buffer("bias", None if reduce is None else product.bias)
        if reduce is not None:
            product.bias = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.product(x)
        if self.reduce is not None:
            y = self.reduce(y)
        return y if self.bias is None else y + self.bias


def mask_arguments(kind: AttentionKind) -> tuple[bool, tuple[int, int]]:
    """flash-attn's `causal` and `window_size`: W tokens are the query itself and W - 1 to its left (and right)."""
    if kind.window is None:
        return kind.causal, EVERYTHING
    return kind.causal, (kind.window - 1, 0 if kind.causal else kind.window - 1)


class ArenaAttention:
    """An `Attend` that appends the blocks' K/V behind each request's context and attends over both.

    Args:
        attention: `flash_attn_with_kvcache`.
        kinds: of the layers.
        keys, values: the arena [entries, layers, capacity, kv_heads, head_dim].
        lengths: context tokens of each request [requests].
        entries: each request's entry of the arena [requests].
    """

    def __init__(
        self,
        attention: Callable[..., Tensor],
        kinds: tuple[AttentionKind, ...],
        keys: Tensor,
        values: Tensor,
        lengths: Tensor,
        entries: Tensor,
    ) -> None:
        self.attention, self.kinds, self.keys, self.values = attention, kinds, keys, values
        self.lengths, self.entries = lengths.to(torch.int32), entries.to(torch.int32)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal, window = mask_arguments(self.kinds[layer])
        requests = len(self.entries)
        dtype = self.keys.dtype
        out = self.attention(
            q=q.view(requests, -1, *q.shape[1:]).to(dtype),
            k_cache=self.keys[:, layer],
            v_cache=self.values[:, layer],
            k=k.view(requests, -1, *k.shape[1:]).to(dtype),
            v=v.view(requests, -1, *v.shape[1:]).to(dtype),
            cache_seqlens=self.lengths[:requests],
            cache_batch_idx=self.entries,
            causal=causal,
            window_size=window,
        )
        return out.reshape(q.shape).to(q.dtype)
