"""Attention of whole sequences packed after one another, without a cache or on their way into one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_serve.checkpoint.config import AttentionKind
from dflash_serve.models.attention.ragged import block_mask
from dflash_serve.models.kv_cache import KVCache, Span


class PackedCausalAttention:
    """Attention of whole sequences packed after one another; keeps no K/V. An `Attend`."""

    def __init__(self, lengths: Sequence[int], kinds: Sequence[AttentionKind], device: torch.device) -> None:
        self.lengths, self.kinds = list(lengths), kinds
        longest = torch.arange(max(lengths), device=device)
        windowed = {kind for kind in kinds if kind.window is not None}
        self.masks = {kind: block_mask(longest, longest, kind) for kind in windowed}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = self.masks.get(self.kinds[layer])
        packed = zip(q.split(self.lengths), k.split(self.lengths), v.split(self.lengths), strict=True)
        return torch.cat([_causal(*sequence, mask) for sequence in packed])


def _causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention of one sequence, all [rows, heads or kv_heads, head_dim]; the mask narrows it to a window."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    seen = None if mask is None else mask[: q.shape[2], : q.shape[2]]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=True)
    return out[0].transpose(0, 1)


class PrefillAttention(PackedCausalAttention):
    """Attention of whole prompts packed after one another, whose K/V is kept, each in its entry of a cache."""

    def __init__(self, cache: KVCache, spans: Sequence[Span], kinds: Sequence[AttentionKind]) -> None:
        super().__init__([span.length for span in spans], kinds, cache.keys.device)
        self.cache, self.spans = cache, spans

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, self.spans, k, v)
        return super().__call__(layer, q, k, v)
