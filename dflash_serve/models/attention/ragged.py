"""Attention of a ragged step: requests of any number of rows, one by one, or by FlashInfer's kernels on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_serve.checkpoint.config import AttentionKind
from dflash_serve.models.attention import Attend, flashinfer
from dflash_serve.models.kv_cache import KVCache, Span


def ragged_attention(cache: KVCache, spans: Sequence[Span], kinds: Sequence[AttentionKind], heads: int) -> Attend:
    """Attention of a flat batch of spans over a cache, for one step."""
    if cache.keys.device.type == "cuda" and flashinfer.usable(cache, spans, kinds):
        return flashinfer.FlashInferAttention(cache, spans, kinds, heads)
    return RaggedAttention(cache, spans, kinds, heads)


class RaggedAttention:
    """One step's attention of a flat batch over a K/V cache: writes the rows' K/V, then attends up to each span's end.

    Masks are made once here, for each kind of layer, not once a layer. An `Attend`.
    """

    def __init__(self, cache: KVCache, spans: Sequence[Span], kinds: Sequence[AttentionKind], heads: int) -> None:
        self.cache, self.spans, self.kinds = cache, spans, kinds
        self.groups = heads // cache.keys.shape[2]
        self.views = {kind: [self._view(span, kind) for span in spans] for kind in set(kinds)}

    def _view(self, span: Span, kind: AttentionKind) -> tuple[int, Tensor | None]:
        """The first key position that matters to the span, and the mask from there on."""
        first = 0 if kind.window is None else max(0, span.start - kind.window + 1)
        if span.length == 1:  # everything up to the row itself
            return first, None
        keys = torch.arange(first, span.start + span.length, device=self.cache.keys.device)
        visible = block_mask(keys[span.start - first :], keys, kind)
        return first, fold_mask(visible, self.groups, self.cache.keys.dtype)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, self.spans, k, v)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        outs, row = [], 0
        for (entry, start, length), (first, mask) in zip(self.spans, self.views[self.kinds[layer]], strict=True):
            seen = slice(first, start + length)
            outs.append(attend(q[row : row + length], keys[entry, :, seen], values[entry, :, seen], mask))
            row += length
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention of one sequence.

    Args:
        q: [rows, heads, head_dim].
        k, v: [kv_heads, keys, head_dim], heads a multiple of kv_heads.
        mask: from `fold_mask`; None = every key is visible to every row.

    Returns:
        [rows, heads, head_dim].
    """
    rows, heads, head_dim = q.shape
    groups = heads // k.shape[0]
    # The query heads that share a key head become extra rows of it: K and V are read once, never repeated.
    folded = q.view(rows, -1, groups, head_dim).permute(1, 2, 0, 3).reshape(-1, groups * rows, head_dim)
    out = F.scaled_dot_product_attention(folded[None], k[None], v[None], attn_mask=mask)[0]
    return out.view(-1, groups, rows, head_dim).permute(2, 0, 1, 3).reshape(rows, heads, head_dim)


def fold_mask(visible: Tensor | None, groups: int, dtype: torch.dtype) -> Tensor | None:
    """Bool [rows, keys], True = visible -> the additive mask [groups * rows, keys] that `attend` takes.

    Additive and folded once a step: SDPA would convert a boolean mask anew in every layer.
    """
    if visible is None:
        return None
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float("-inf")).repeat(groups, 1)


def block_mask(query_positions: Tensor, key_positions: Tensor, kind: AttentionKind) -> Tensor | None:
    """Bool [rows, keys] of what a block sees in a layer of this kind; None where it sees everything.

    Keys are the context (positions before the block) followed by the block itself, which `causal` alone tells apart:
    a context position is never after a query.
    """
    if kind.window is None and not kind.causal:
        return None
    distance = query_positions[:, None] - key_positions[None, :]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if kind.causal:
        visible &= distance >= 0
    if kind.window is not None:
        visible &= distance < kind.window
        visible &= distance > -kind.window
    return visible
