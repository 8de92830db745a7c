"""Attention, asked of the caller: a model projects q, k and v, and whoever keeps the K/V cache attends.

So one model serves a preallocated cache, an engine's own pages and training's masks alike. Each module here is one way.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Attend(Protocol):
    """Attention of the block over context and block, owned by whoever keeps the context K/V."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [rows, heads, head_dim]; k, v [rows, kv_heads, head_dim] of the block's own rows, rotated -> like q."""
        ...
