"""Does it fit? Weights of target and drafter, both K/V pools, graphs, against one device. Estimates, on the safe side.

SGLang's drafter has a K/V slot for every slot of the target (one index space): its pool grows with the target's, which
surprised users (sglang#40665), so both are counted per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dflash_serve.checkpoint.tensors import context_bytes, weight_bytes
from dflash_serve.errors import Problem
from dflash_serve.gpus import GIB, Gpu

from .plan import Plan

RUNTIME = 3 * GIB
"""CUDA context, NCCL, workspaces."""
GRAPHS = 3 * GIB
"""CUDA graphs of target and drafter, and activations of a prefill."""
KV_BYTES = {"auto": 2.0, "bfloat16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    total: int
    target: int
    drafter: int
    token: int
    """K/V of one token, target's and drafter's."""

    @property
    def pool(self) -> int:
        """What is left for K/V; may be negative."""
        return self.total - self.target - self.drafter - RUNTIME - GRAPHS

    @property
    def tokens(self) -> int:
        """How many the pools hold."""
        return max(0, self.pool // self.token)

    def static_fraction(self, share: float) -> float:
        """`--mem-fraction-static`: of all memory, for weights and K/V, where K/V gets `share` of what weights leave."""
        weights = self.target + self.drafter
        return round((weights + share * (self.total - weights)) / self.total, 3)


def memory_of(plan: Plan, gpu: Gpu) -> Memory:
    """The estimate for one device of that kind."""
    parallel = plan.deployment.parallel
    split = 1 if parallel.attention_data else parallel.tensor
    token = plan.target.kv_bytes(KV_BYTES[plan.deployment.kv_cache.dtype])
    token //= 1 if plan.target.latent else min(split, plan.target.kv_heads)
    drafter = 0
    if plan.drafter is not None:
        drafter = weight_bytes(plan.drafter) // split
        token += context_bytes(plan.drafter) // min(split, plan.drafter.num_key_value_heads)
    return Memory(gpu.memory, plan.target.weight_bytes // parallel.tensor, drafter, token)


def memory_problems(plan: Plan) -> Iterator[Problem]:
    """Nothing where the deployment does not name its GPU."""
    if plan.gpu is None:
        return
    memory = memory_of(plan, plan.gpu)
    if memory.pool <= 0:
        what = (
            f"one device needs {_gib(memory.target)} for the target, {_gib(memory.drafter)} for the drafter and "
            f"{_gib(RUNTIME + GRAPHS)} to run, but a {plan.gpu.name} has {_gib(memory.total)}"
        )
        yield Problem(what, "hardware", "use more devices (parallel.tensor), or a quantised target")
        return
    longest = plan.deployment.limits.max_model_len or plan.target.shape.max_position_embeddings
    if longest is not None and memory.tokens < longest:
        what = f"{longest} tokens, but after the weights there is room for the K/V of about {memory.tokens}"
        do = "shorten it, use kv_cache.dtype fp8, or more devices"
        yield Problem(what, "limits.max_model_len", do)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
