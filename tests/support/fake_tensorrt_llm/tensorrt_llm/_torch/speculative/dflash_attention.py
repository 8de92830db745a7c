"""flash_attn_with_kvcache in plain PyTorch: append at the sequence's length, then attend up to there."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


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
        keys, values = k_cache[slot, :end].transpose(0, 1), v_cache[slot, :end].transpose(0, 1)
        groups = q.shape[2] // keys.shape[0]
        visible = _visible(torch.arange(length, end), torch.arange(end), causal, window_size)
        outs.append(
            F.scaled_dot_product_attention(
                q[row].transpose(0, 1)[None],
                keys.repeat_interleave(groups, 0)[None],
                values.repeat_interleave(groups, 0)[None],
                attn_mask=visible,
            )[0].transpose(0, 1)
        )
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
