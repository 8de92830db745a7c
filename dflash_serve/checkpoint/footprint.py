"""How many bytes a drafter takes on devices, in bf16."""

from __future__ import annotations

from math import prod

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.tensor_names import expected_tensors

BF16 = 2


def weight_bytes(drafter: DrafterConfig) -> int:
    """All its tensors."""
    return BF16 * sum(prod(shape) for shape in expected_tensors(drafter).values())


def context_bytes(drafter: DrafterConfig, kv_heads: int | None = None) -> int:
    """K and V of one context token in all its layers; `kv_heads` are those of one device, None = all."""
    heads = drafter.num_key_value_heads if kv_heads is None else kv_heads
    return 2 * drafter.num_layers * heads * drafter.head_dim * BF16
