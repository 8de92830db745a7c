"""The drafter's context arena: the buffer that surprised users with 80 GB (issue #16005), computed before it is made.

The worker holds K/V of every context token of every slot, densely: slots x layers x (max_seq_len + B) x 2 x K/V heads
x head_dim, one slot more than the batch, per device (`dflash.py` @00679c6 `_lazy_init_ctx_buffers`). It is allocated
outside the K/V pool, so `free_gpu_memory_fraction` does not bound it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.tensors import context_bytes
from dflash_serve.gpus import GIB, Gpu

OVERHEAD = 4 * GIB
"""CUDA context, NCCL, workspaces; upstream's own estimate (test_dflash_config_budget.py @414ba69)."""
ACTIVATIONS = 4 * GIB
"""Left for activations and CUDA graphs."""
LEAST_POOL = 0.15
"""Share of the memory after the weights that must stay for the target's K/V, or batches would not fit."""
PAGE = 32
"""Tokens a page of the paged arena (attention_backend TRTLLM)."""


def kv_heads_per_device(heads: int, tensor: int) -> int:
    """K/V heads on one device: split, or repeated where there are more devices than heads."""
    return max(1, heads // tensor)


@dataclass(frozen=True)
class Arena:
    """The arena of one device."""

    drafter: DrafterConfig
    block_size: int
    kv_heads: int
    """On this device."""
    paged: bool

    def bytes(self, max_batch_size: int, max_model_len: int) -> int:
        """Its size, bf16."""
        capacity = min(max_model_len, self.drafter.max_position_embeddings) + self.block_size
        if self.paged:
            capacity = -(-capacity // PAGE) * PAGE
        return (max_batch_size + 1) * capacity * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """K and V of one context token in all drafter layers, bf16."""
        return context_bytes(self.drafter, self.kv_heads)

    def largest_batch(self, budget: int, max_model_len: int) -> int:
        """The largest batch whose arena fits; 0 = none."""
        return max(0, budget // self.bytes(0, max_model_len) - 1)

    def longest(self, budget: int, max_batch_size: int) -> int:
        """The longest max_model_len whose arena fits; 0 = none."""
        capacity = budget // (self.token_bytes * (max_batch_size + 1))
        longest = capacity - capacity % PAGE - self.block_size
        return max(0, longest - longest % PAGE)


def after_weights(gpu: Gpu, weight_bytes: int) -> int:
    """Memory of a device that weights, runtime and activations leave; may be negative."""
    return gpu.memory - weight_bytes - OVERHEAD - ACTIVATIONS


def arena_budget(gpu: Gpu, weight_bytes: int) -> int:
    """What the arena may take so that the target's K/V keeps its least share."""
    return max(0, int(after_weights(gpu, weight_bytes) * (1 - LEAST_POOL)))


def pool_fraction(gpu: Gpu, weight_bytes: int, arena: int) -> float:
    """`free_gpu_memory_fraction` that leaves room for the arena: a share of what is free after the weights."""
    free = gpu.memory - weight_bytes - OVERHEAD
    return max(0.05, min(0.9, int(100 * (free - ACTIVATIONS - arena) / free) / 100)) if free > 0 else 0.05
