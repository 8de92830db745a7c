"""PyTorch forms of the kernels that SGLang has for GPUs only, as far as a DFlash server on a CPU meets them."""

from __future__ import annotations

from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


def install() -> None:
    """Puts them in place through SGLang's own hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _streams()
    torch.cpu.Event = Event  # type: ignore[misc]
    replacements = {
        "sglang.kernels.ops.attention.table_qk_norm_rope.table_qk_norm_rope_": qk_norm_rope,
        "sglang.kernels.ops.kvcache.cache_move.copy_all_layer_kv_cache_func": _nothing,
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func": assign_entries,
        "sglang.kernels.ops.speculative.dflash._prepare_dflash_draft_block_unchecked": prepare_blocks,
        "sglang.kernels.ops.speculative.dflash._compute_dflash_accept_bonus_triton_unchecked": accept_blocks,
    }
    for name, function in replacements.items():
        HookRegistry.register(name, function, HookType.REPLACE)
    HookRegistry.register("sglang.srt.models.dflash.DFlashDraftModel.forward", in_own_dtype, HookType.AROUND)
    # The last step of the worker's constructor; the constructor itself can be hooked once only, which the plug-in does.
    built = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._defer_target_verify_gather"
    HookRegistry.register(built, with_fused_kernels, HookType.AROUND)
    dspark = "sglang.srt.arg_groups.speculative_hook._handle_dspark"
    HookRegistry.register(dspark, with_dspark, HookType.AROUND)
    gather = "sglang.srt.distributed.parallel_state.GroupCoordinator.all_gather_into_tensor"
    HookRegistry.register(gather, gathered, HookType.AROUND)


def with_dspark(handle: Any, server_args: Any) -> Any:
    """SGLang refuses DSPARK on a CPU by the device's name; each of its kernels has a PyTorch form for other devices."""
    from sglang.srt.arg_groups import speculative_hook

    view_of = speculative_hook.resolving_view

    class View:
        """What was decided so far, but for the name of the device."""

        device = "xpu"

        def __init__(self, args: Any) -> None:
            self._view = view_of(args)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._view, name)

    with patch.object(speculative_hook, "resolving_view", View):
        return handle(server_args)


def _streams() -> None:
    """A CPU has none; SGLang tells tensors about them all the same."""
    record = torch.Tensor.record_stream

    def record_stream(self: Tensor, stream: Any) -> None:
        if self.device.type != "cpu":
            record(self, stream)

    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign, assignment]


class Event(torch.cpu.Event):
    """With a time, as events of devices have."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.record()

    def record(self, stream: Any = None) -> None:
        self._at = perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end._at - self._at)


def _nothing(*_: Any, **__: Any) -> None:
    """Only warms a kernel up."""


def qk_norm_rope(
    qkv: Tensor,
    positions: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    q_heads: int,
    k_heads: int,
    head_dim: int,
    eps: float,
) -> None:
    """RMSNorm and rotary embedding of the q and k heads of qkv [rows, (q + k + v heads) * d], in place."""
    width = (q_heads + k_heads) * head_dim
    x = qkv[:, :width].view(-1, q_heads + k_heads, head_dim).float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    weight = torch.cat([q_weight.float().expand(q_heads, head_dim), k_weight.float().expand(k_heads, head_dim)])
    x = (x * weight).to(qkv.dtype).float()
    cos, sin = (part[:, None] for part in cos_sin[positions].float().chunk(2, dim=-1))
    a, b = x.chunk(2, dim=-1)
    rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    qkv[:, :width] = rotated.reshape(qkv.shape[0], -1).to(qkv.dtype)


def assign_entries(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """Notes the new K/V entries of each request in its row; as on a GPU nothing keeps them from the next row."""
    taken, table = 0, req_to_token.view(-1)
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in spans:
        at = row * req_to_token.shape[1]
        table[at + start : at + end] = out_cache_loc[taken : taken + end - start].to(table.dtype)
        taken += end - start


def prepare_blocks(
    *,
    bonus_tokens: Tensor,
    prefix_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    block_ids_out: Tensor,
    positions_out: Tensor,
    cache_loc_out: Tensor,
    mask_token_id: int,
) -> None:
    """Ids (the anchors, then masks), positions and K/V entries of blocks [n, B], into the three outputs."""
    assert all(out.is_contiguous() for out in (block_ids_out, positions_out, cache_loc_out))
    positions = prefix_lens[:, None] + torch.arange(block_ids_out.shape[1])
    last = req_to_token.shape[1] - 1
    entries = req_to_token[req_pool_indices[:, None], positions.clamp(max=last)]
    block_ids_out.fill_(mask_token_id)
    block_ids_out[:, 0] = bonus_tokens
    positions_out.copy_(positions)
    cache_loc_out.copy_(torch.where(positions <= last, entries, 0))


def accept_blocks(
    *,
    candidates: Tensor,
    target_top1: Tensor,
    accept_lens_out: Tensor,
    commit_lens_out: Tensor,
    bonus_ids_out: Tensor,
    out_tokens_out: Tensor,
    prefix_lens: Tensor,
    new_seq_lens_out: Tensor,
) -> None:
    """Accepts drafts of candidates [n, w] (the anchor first) as far as the target agrees; writes the five outputs."""
    assert all(tokens.is_contiguous() for tokens in (candidates, target_top1, out_tokens_out))
    assert candidates.shape == target_top1.shape == out_tokens_out.shape
    accepted = (candidates[:, 1:] == target_top1[:, :-1]).long().cumprod(1).sum(1)
    bonus = target_top1.gather(1, accepted[:, None])
    accept_lens_out.copy_(accepted)
    commit_lens_out.copy_(accepted + 1)
    bonus_ids_out.copy_(bonus[:, 0])
    out_tokens_out[:, :-1] = candidates[:, 1:]
    out_tokens_out[:, -1] = 0
    out_tokens_out.scatter_(1, accepted[:, None], bonus)
    new_seq_lens_out.copy_(prefix_lens + accepted + 1)


def with_fused_kernels(deferred: Any, worker: Any) -> Any:
    """SGLang takes its fused kernels on GPUs only; here they have PyTorch forms."""
    worker._use_triton_prepare_block = worker._use_triton_accept_bonus = True
    return deferred(worker)


def gathered(_: Any, group: Any, output: Tensor, part: Tensor) -> None:
    """As SGLang's in-tree CPU does: its custom operator exists for GPUs only."""
    group._all_gather_into_tensor(output, part)


def in_own_dtype(forward: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang casts a draft's input to bfloat16 whatever its weights are; only in float32 is losslessness exact."""
    embeds = kwargs.get("input_embeds")
    if embeds is not None:
        kwargs["input_embeds"] = embeds.to(model.norm.weight.dtype)
    return forward(model, *args, **kwargs)
