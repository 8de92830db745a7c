"""The drafter's context arena, which surprised users with 80 GB (issue #16005): its size, and whether it fits.

The worker holds K/V of every context token of every request, densely: entries x layers x (max_seq_len + B) x 2 x K/V
heads x head_dim, one entry more than the batch, per device (`dflash.py` @00679c6 `_lazy_init_ctx_buffers`). It is
allocated outside the K/V pool, so `free_gpu_memory_fraction` does not bound it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dflash_serve.checkpoint.config import DrafterConfig, context_bytes
from dflash_serve.deployment import GIB, Gpu
from dflash_serve.errors import Problem

from .launch_plan import LaunchPlan

OVERHEAD = 4 * GIB
"""CUDA context, NCCL, workspaces; upstream's own estimate (test_dflash_config_budget.py @414ba69)."""
ACTIVATIONS = 4 * GIB
"""Left for activations and CUDA graphs."""
LEAST_POOL = 0.15
"""Share of the memory after the weights that must stay for the target's K/V, or batches would not fit."""
PAGE = 32
"""Tokens a page of the paged arena (attention_backend TRTLLM)."""


@dataclass(frozen=True)
class Arena:
    """The arena on one device, dense or in pages."""

    drafter: DrafterConfig
    block_size: int
    kv_heads: int
    """On this device."""
    paged: bool

    def bytes(self, max_batch_size: int, max_model_len: int) -> int:
        """The arena's size, bf16."""
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


def arena_of(plan: LaunchPlan) -> Arena:
    """The arena on one device, with its share of the K/V heads, or one that neighbours repeat. Needs a drafter."""
    assert plan.drafter is not None
    heads = max(1, plan.drafter.num_key_value_heads // plan.drafter_devices)
    return Arena(plan.drafter, plan.block_size, heads, plan.attention_backend == "TRTLLM")


def after_weights(gpu: Gpu, weight_bytes: int) -> int:
    """Memory of a device that weights, runtime and activations leave; may be negative."""
    return gpu.memory - weight_bytes - OVERHEAD - ACTIVATIONS


def arena_budget(gpu: Gpu, weight_bytes: int) -> int:
    """What the arena may take so that the target's K/V keeps its least share."""
    return max(0, int(after_weights(gpu, weight_bytes) * (1 - LEAST_POOL)))


def pool_fraction(plan: LaunchPlan, gpu: Gpu) -> float:
    """`free_gpu_memory_fraction` that leaves room for the arena: a share of what is free after the weights."""
    arena = arena_of(plan).bytes(plan.deployment.limits.max_batch_size, plan.max_model_len)
    free = gpu.memory - plan.weight_bytes - OVERHEAD
    return max(0.05, min(0.9, int(100 * (free - ACTIVATIONS - arena) / free) / 100)) if free > 0 else 0.05


def memory_problems(plan: LaunchPlan) -> Iterator[Problem]:
    """Weights, or an arena, that a device cannot hold, and the limit to lower; nothing where no GPU is named."""
    if plan.gpu is None:
        return
    if after_weights(plan.gpu, plan.weight_bytes) <= 0:
        yield _heavy_weights(plan, plan.gpu)
    elif plan.drafter is not None:
        yield from _large_arena(plan, plan.gpu)


def _heavy_weights(plan: LaunchPlan, gpu: Gpu) -> Problem:
    what = f"about {plan.weight_bytes / GIB:.0f} GiB of weights a device, of {gpu.memory // GIB} GiB on a {gpu.name}"
    return Problem(what, "parallel.tensor", "use more devices, or a smaller precision")


def _large_arena(plan: LaunchPlan, gpu: Gpu) -> Iterator[Problem]:
    limits, budget = plan.deployment.limits, arena_budget(gpu, plan.weight_bytes)
    arena = arena_of(plan)
    needed = arena.bytes(limits.max_batch_size, plan.max_model_len)
    if needed <= budget:
        return
    config = arena.drafter
    what = (
        f"the drafter's context needs {needed / GIB:.1f} GiB a device ({limits.max_batch_size} + 1 entries x "
        f"{config.num_layers} layers x {plan.max_model_len} tokens + {plan.block_size} x {arena.kv_heads} K/V heads x "
        f"{config.head_dim} x 2 x 2 bytes), {budget / GIB:.1f} GiB can be spared"
    )
    options = []
    if batch := arena.largest_batch(budget, plan.max_model_len):
        options.append(f"limits.max_batch_size to {batch}")
    if length := arena.longest(budget, limits.max_batch_size):
        options.append(f"limits.max_model_len to {length}")
    yield Problem(what, "limits", f"lower {' or '.join(options)}" if options else "use more devices, or a larger GPU")
