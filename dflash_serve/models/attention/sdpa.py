"""Grouped-query attention over flat rows, and the masks of a block: shared by drafter, target and training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_serve.checkpoint.config import AttentionKind


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
