"""Requests that fit on a device: K/V and recurrent states beside the weights of target and drafter.

The library of the operator tables is not asked: it counts no scales of MXFP4 and INT4 weights, Qwen3.5's recurrent
state once a token, and none of Nemotron-H's.
"""

from __future__ import annotations

from dflash_serve.checkpoint.config import context_bytes
from dflash_serve.deployment.gpus import Gpu
from dflash_serve.planning.step_times import Pair, Split, kv_bytes

MEMORY_SHARE = 0.85  # Share of the memory beside weights and runtime that K/V get, where the deployment names none
RUNTIME_BYTES = 5.5e9  # Activations and an engine's buffers, about as the operator tables' library counts them


def kv_tokens(pair: Pair, on: Gpu, split: Split, context: int = 1, *, drafts: bool = True) -> int:
    """Tokens of all requests, each of `context` tokens, that fit beside both models, or beside the target alone."""
    free, request = _free_and_needed(pair, on, split, context, drafts)
    return max(0, int(free * context / request))


def missing_bytes(pair: Pair, on: Gpu, split: Split, context: int, *, drafts: bool) -> float:
    """Memory that each device lacks for one request of `context` tokens; 0 = it fits."""
    free, request = _free_and_needed(pair, on, split, context, drafts)
    return max(0.0, (request - free) / _share(pair))


def _share(pair: Pair) -> float:
    return MEMORY_SHARE if pair.memory_fraction is None else pair.memory_fraction


def _free_and_needed(pair: Pair, on: Gpu, split: Split, context: int, drafts: bool) -> tuple[float, float]:
    # Bytes of a device for K/V and states, and those of one request.
    layout, drafter, tensor = pair.layout, pair.drafter, split.tensor
    beside = on.memory - RUNTIME_BYTES - layout.weight_bytes / tensor
    request, states = kv_bytes(pair, tensor, context), 1
    if drafts:
        beside -= pair.draft_bytes / tensor
        request += context * context_bytes(drafter) / drafter.kv_split(tensor)
        states += drafter.block_size  # a recurrent state cannot be cut back: engines keep one for every slot, too
    return _share(pair) * beside, max(1.0, request + states * layout.state_bytes / tensor)
