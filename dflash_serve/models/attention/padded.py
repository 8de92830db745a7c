"""One step's attention with the same number of rows for every sequence: one SDPA a layer, whoever is in the batch.

Made for GPUs, where a kernel a sequence and layer would cost more than the work in it, and where shapes that do not
change from step to step can be captured in a CUDA graph. `ragged.RaggedAttention` is the same maths sequence by
sequence, without padding: the faster one on a CPU, and the oracle of this one's tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_serve.checkpoint.config import AttentionKind
from dflash_serve.models.kv_cache import KVCache


class PaddedAttention:
    """Writes N x W rows of K/V, then attends over the first `length` positions of each entry. An `Attend`.

    Every shape follows from N, W and `length`; where sequences are and how long is read from tensors alone.

    Args:
        entries: int64 [N]; None = every entry of the cache in order, which are read where they lie, not gathered.
        positions: int64 [N, W], the rows' places in their entries, consecutive.
        length: keys read of each entry; more than any position.
    """

    def __init__(
        self,
        cache: KVCache,
        entries: Tensor | None,
        positions: Tensor,
        length: int,
        kinds: Sequence[AttentionKind],
        heads: int,
    ) -> None:
        self.cache, self.length, self.kinds = cache, length, kinds
        self.shape = positions.shape
        self.entries = slice(None) if entries is None else entries
        all_entries = torch.arange(len(positions), device=positions.device) if entries is None else entries
        self.row_entries = all_entries[:, None].expand_as(positions).reshape(-1)
        self.row_positions = positions.reshape(-1)
        groups = heads // cache.keys.shape[2]
        self.masks = {kind: self._mask(positions, kind, groups) for kind in set(kinds)}

    def _mask(self, positions: Tensor, kind: AttentionKind, groups: int) -> Tensor:
        """Additive [N, 1, groups * W, length]: the query heads of a key head are rows of it (`attention.attend`)."""
        keys = torch.arange(self.length, device=positions.device)
        distance = positions[:, :, None] - keys
        # What lies behind the block is what others left there.
        hidden = keys > positions[:, -1:, None]
        if kind.causal:
            hidden = hidden | (distance < 0)
        if kind.window is not None:
            hidden = hidden | (distance >= kind.window) | (distance <= -kind.window)
        mask = torch.zeros_like(distance, dtype=self.cache.keys.dtype).masked_fill_(hidden, float("-inf"))
        return mask.repeat(1, groups, 1)[:, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write_rows(layer, self.row_entries, self.row_positions, k, v)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        count, width = self.shape
        heads, head_dim = q.shape[1:]
        kv_heads = k.shape[1]
        folded = q.view(count, width, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        folded, seen = folded.reshape(count, kv_heads, -1, head_dim), slice(0, self.length)
        mask = self.masks[self.kinds[layer]]
        out = F.scaled_dot_product_attention(folded, keys[self.entries, :, seen], values[self.entries, :, seen], mask)
        out = out.view(count, kv_heads, -1, width, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(count * width, heads, head_dim)
