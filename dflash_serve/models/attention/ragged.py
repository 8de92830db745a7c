"""Attention of a ragged step: requests of any number of rows, one by one, or by FlashInfer's kernels on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_serve.checkpoint.config import AttentionKind
from dflash_serve.models.attention import Attend, flashinfer
from dflash_serve.models.attention.sdpa import attend, block_mask, fold_mask
from dflash_serve.models.kv_cache import KVCache, Span


def ragged_attention(cache: KVCache, spans: Sequence[Span], kinds: Sequence[AttentionKind], heads: int) -> Attend:
    """Attention of a flat batch of spans over a cache, for one step."""
    if flashinfer.usable(cache, spans, kinds):
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
