"""Number of K/V groups that vLLM makes of a target and its drafter, counted by the installed vLLM's own code.

vLLM puts layers with the same kind of K/V into groups of one size, the number of layers of the rarest kind. Every group
has a block table of its own and is prepared anew in every step. A drafter with a single layer of a kind makes groups of
one layer (vllm#49730).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from math import ceil
from types import SimpleNamespace as Stub
from typing import Any, NamedTuple

from dflash_serve.adapter.launch import kv_bytes_each

from .facts import RELEASES
from .settings import VLLMSettings

PLANNING = ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils")  # where 0.33 and 0.32 have it
BLOCK = 16  # tokens: vLLM's block of attention on GPUs, and what a hybrid target's longer blocks are a multiple of
OTHERWISE = {
    *("block-size", "disable-hybrid-kv-cache-manager", "kv-transfer-config", "kv-offloading-size"),
    *("attention-backend", "attention-config", "mamba-block-size", "mamba-cache-mode", "mamba-ssm-cache-dtype"),
}
"""Arguments on which groups depend, and which are not read here."""


class Layer(NamedTuple):
    """The K/V of one layer on one device."""

    heads: int
    head_dim: int
    bytes_each: int = 2  # of one number
    window: int | None = None  # tokens that it keeps; None = all
    state: int = 0  # bytes of a recurrent state instead of K/V


class Grouping(NamedTuple):
    """K/V groups of one launch."""

    groups: int
    request_bytes: int  # of one device, for one request of the longest length


def group_layers(layers: Sequence[Layer], *, tokens: int, step_tokens: int, drafted: int, reuse: bool) -> Grouping:
    """The grouping by the installed vLLM, for requests of `tokens` tokens and steps of `step_tokens`.

    `drafted`: tokens drafted for one step, each of which has a copy of every recurrent state. `reuse`: prefix caching.

    Raises:
        ImportError: vLLM is not installed.
    """
    with redirect_stdout(sys.stderr):  # where vLLM's log goes as soon as it is imported
        planning = import_module(next(name for name in PLANNING if find_spec(name)))
        kinds, torch = import_module("vllm.v1.kv_cache_interface"), import_module("torch")
        layout = import_module("vllm.v1.kv_cache_layout").KVCacheLayout.LBNHC
    page, block, mode = 0, BLOCK, "align" if reuse else "none"
    if states := [layer.state for layer in layers if layer.state]:
        token = next(2 * layer.heads * layer.head_dim * layer.bytes_each for layer in layers if not layer.state)
        block = BLOCK * ceil(max(states) / (BLOCK * token))  # attention's pages are as large as a state
        page = block * token

    def spec(layer: Layer) -> Any:
        if layer.state:
            shape, dtype = ((layer.state // 4,),), (torch.float32,)
            copies = {"num_speculative_blocks": drafted, "mamba_cache_mode": mode}
            return kinds.MambaSpec(block_size=block, shapes=shape, dtypes=dtype, page_size_padded=page, **copies)
        dtype = torch.uint8 if layer.bytes_each == 1 else torch.bfloat16
        sizes = {"block_size": block, "num_kv_heads": layer.heads, "head_size": layer.head_dim, "dtype": dtype}
        if layer.window is None:
            return kinds.FullAttentionSpec(**sizes)
        return kinds.SlidingWindowSpec(**sizes, sliding_window=layer.window)

    config = Stub(
        scheduler_config=Stub(disable_hybrid_kv_cache_manager=False),
        speculative_config=None,
        attention_config=None,
        model_config=Stub(max_model_len=tokens),
        parallel_config=Stub(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        cache_config=Stub(get_resolved_kv_cache_layout=lambda: layout, mamba_cache_mode=mode),
        max_in_flight_tokens=step_tokens,
    )
    with redirect_stdout(sys.stderr):
        found = planning.get_kv_cache_groups(config, {f"layers.{at}": spec(one) for at, one in enumerate(layers)})
    if len(found) == 1:
        return Grouping(1, sum(spec(layer).max_memory_usage_bytes(config) for layer in layers))
    size = max(len(group.layer_names) for group in found)  # a block of any group has room for as many layers
    return Grouping(len(found), sum(size * one.kv_cache_spec.max_memory_usage_bytes(config) for one in found))


def groupings(settings: VLLMSettings) -> tuple[Grouping, Grouping] | None:
    """The groupings without and with the drafter; None = not known, or a drafter that cannot change the groups."""
    drafter, longest = settings.drafter, settings.deployment.limits.max_model_len
    longest = longest or settings.target.shape.max_position_embeddings
    target = _target_layers(settings)
    others = settings.on_cpu or settings.is_half or bool(OTHERWISE & settings.given)
    if (
        drafter is None
        or drafter.latent is not None
        or settings.block_size is None
        or longest is None
        or target is None
        or others
    ):
        return None
    heads = max(1, drafter.num_key_value_heads // settings.deployment.parallel.tensor)
    drafts = [Layer(heads, drafter.head_dim, window=kind.window) for kind in drafter.layers]
    if not settings.target.recurrent and all(layer.window is None for layer in [*target, *drafts]):
        return None  # one group, whatever the layers' sizes are
    if not RELEASES.supports(RELEASES.installed()) or RELEASES.import_problem():
        return None
    reuse = settings.deployment.kv_cache.block_reuse is not False
    count = partial(group_layers, tokens=longest, step_tokens=settings.rows, reuse=reuse)
    drafted = settings.block_size - 1
    return count(target, drafted=0), count([*target, *drafts], drafted=drafted)


def _target_layers(settings: VLLMSettings) -> list[Layer] | None:
    """The target's layers on one device; None = of a kind that is not covered here."""
    target, devices = settings.target, settings.deployment.parallel.tensor
    each = kv_bytes_each(settings.deployment, target)
    plain = all(layer.width == 2 * target.kv_heads * target.head_dim for layer in target.kv_layers)
    states_known = not target.recurrent or bool(target.state_bytes and target.state_layers)
    chunked = target.architecture.startswith("Llama4")
    if target.latent or chunked or not (plain and states_known and target.kv_layers) or each not in (1, 2):
        return None
    if settings.deployment.parallel.pipeline > 1:
        return None
    heads = max(1, target.kv_heads // devices)
    attention = [Layer(heads, target.head_dim, int(each), layer.window) for layer in target.kv_layers]
    state = target.state_bytes // max(1, target.state_layers) // devices
    return [*attention, *[Layer(0, 0, state=state)] * target.state_layers]
