"""flash_attn_with_kvcache in plain PyTorch: append at the sequence's length, then attend up to there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dflash_serve.models.attention import attend, fold_mask


def get_dflash_flash_attention() -> Callable[..., Tensor]:
    return flash_attn_with_kvcache


def flash_attn_with_kvcache(
    *,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """q [B, S, H, D]; caches [slots, capacity, Hkv, D], written in place; k, v [B, S, Hkv, D]."""
    outs = []
    for row, (slot, length) in enumerate(zip(cache_batch_idx.tolist(), cache_seqlens.tolist(), strict=True)):
        end = length + q.shape[1]
        k_cache[slot, length:end], v_cache[slot, length:end] = k[row], v[row]
        first = max(0, length - window_size[0]) if window_size[0] >= 0 else 0
        visible = _visible(torch.arange(length, end), torch.arange(first, end), causal, window_size)
        mask = None if visible.all() else fold_mask(visible, q.shape[2] // k.shape[2], q.dtype)
        # Summed in the core's order, so that what differs is the drafter's doing.
        keys, values = (cache[slot, first:end].transpose(0, 1).contiguous() for cache in (k_cache, v_cache))
        outs.append(attend(q[row], keys, values, mask))
    return torch.stack(outs)


def _visible(queries: Tensor, keys: Tensor, causal: bool, window: tuple[int, int]) -> Tensor:
    distance = queries[:, None] - keys[None, :]
    left, right = window[0], 0 if causal else window[1]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        visible &= distance <= left
    if right >= 0:
        visible &= distance >= -right
    return visible
