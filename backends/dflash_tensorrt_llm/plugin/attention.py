"""Attention of the blocks over the worker's context arena, by the op that TensorRT-LLM uses for it (flash-attn)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dflash_serve.checkpoint.config import AttentionKind

EVERYTHING = (-1, -1)


def mask_arguments(kind: AttentionKind) -> tuple[bool, tuple[int, int]]:
    """flash-attn's `causal` and `window_size`: W tokens are the query itself and W - 1 to its left (and right)."""
    if kind.window is None:
        return kind.causal, EVERYTHING
    return kind.causal, (kind.window - 1, 0 if kind.causal else kind.window - 1)


class PooledAttention:
    """Appends the blocks' K/V behind each request's context and attends over both. Satisfies `drafter.model.Attend`.

    Args:
        attention: `flash_attn_with_kvcache`.
        kinds: of the layers.
        keys, values: the arena [slots, layers, capacity, kv_heads, head_dim].
        lengths: context tokens of each request [requests].
        slots: of each request [requests].
    """

    def __init__(
        self,
        attention: Callable[..., Tensor],
        kinds: tuple[AttentionKind, ...],
        keys: Tensor,
        values: Tensor,
        lengths: Tensor,
        slots: Tensor,
    ) -> None:
        self.attention, self.kinds, self.keys, self.values = attention, kinds, keys, values
        self.lengths, self.slots = lengths.to(torch.int32), slots.to(torch.int32)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal, window = mask_arguments(self.kinds[layer])
        requests = len(self.slots)
        dtype = self.keys.dtype
        out = self.attention(
            q=q.view(requests, -1, *q.shape[1:]).to(dtype),
            k_cache=self.keys[:, layer],
            v_cache=self.values[:, layer],
            k=k.view(requests, -1, *k.shape[1:]).to(dtype),
            v=v.view(requests, -1, *v.shape[1:]).to(dtype),
            cache_seqlens=self.lengths[:requests],
            cache_batch_idx=self.slots,
            causal=causal,
            window_size=window,
        )
        return out.reshape(q.shape).to(q.dtype)
