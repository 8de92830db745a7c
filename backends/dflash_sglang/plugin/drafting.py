"""Blocks in SGLang's terms (after `DFlashWorkerV2`, 0.5.23): their K/V entries, and the drafter's pass over them.

Shapes: n requests, B slots in a drafted block. Every token has a K/V entry, named by its index in SGLang's pools.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.speculative.dflash_worker_v2 import _resolve_dflash_embedding_module
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from .host import HostWorker, draft_scope


def block_entries(worker: HostWorker, batch: Any, width: int) -> tuple[Any, Any]:
    """K/V entries [n * width] of the blocks' first slots, reserved by the scheduler, and SGLang's plan of them."""
    prefix, runner = batch.seq_lens, worker.model_runner
    entries = assign_extend_cache_locs_func(
        req_pool_indices=batch.req_pool_indices,
        req_to_token=runner.req_to_token_pool.req_to_token,
        start_offset=prefix,
        end_offset=prefix + width,
        batch_size=len(prefix),
        draft_token_num=width,
        device=worker.device,
    )
    known = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else batch.spec_info.nxt_kv_lens_cpu
    kv_plan = runner.kv_index_translator.plan(
        req_pool_indices=batch.req_pool_indices,
        seq_lens=prefix,
        seq_lens_cpu=known,
        write_virtual=entries,
        read_extent=width,
    )
    return entries, kv_plan


def positions_of(prefix: Any, width: int) -> Any:
    """Positions [n, width] of the slots after each prefix."""
    return prefix[:, None] + torch.arange(width, device=prefix.device)


def draft_block(worker: HostWorker, batch: Any) -> Any:
    """Greedy drafts [n, B - 1] for slots 1..B-1 of every request's block."""
    block, prefix = int(worker.block_size), batch.seq_lens
    worker._ensure_draft_block_buffers(len(prefix))
    entries, kv_plan = block_entries(worker, batch, block)
    ids = torch.full((len(prefix), block), int(worker._mask_token_id), dtype=torch.int64, device=prefix.device)
    ids[:, 0] = batch.spec_info.bonus_tokens
    lengths, lengths_cpu = _lengths(worker, batch, entries.view(-1, block))
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(prefix),
        input_ids=ids.flatten(),
        req_pool_indices=batch.req_pool_indices,
        seq_lens=lengths,
        out_cache_loc=entries,
        seq_lens_sum=int(lengths_cpu.sum()),
        seq_lens_cpu=lengths_cpu,
        positions=positions_of(prefix, block).reshape(-1),
        input_embeds=_embeds(worker, ids),
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=worker._draft_block_spec_info,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        num_token_non_padded=_row_count(ids),
        global_num_token_non_padded_cpu=ids.numel(),
        can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
    )
    _bind(worker, kv_plan, forward_batch, lengths, lengths_cpu)
    with torch.inference_mode(), draft_scope(worker):
        output = worker.draft_model_runner.forward(forward_batch)
    return _tokens(worker, output, len(prefix), block)


def _embeds(worker: HostWorker, ids: Any) -> Any:
    """The target's embedding of the blocks, [n * B, H]."""
    target = worker.target_worker.model_runner.model
    embeds = unwrap_lora_layer(_resolve_dflash_embedding_module(worker.draft_model, target))(ids)
    return (embeds * worker._noise_embed_scale).view(-1, embeds.shape[-1])


def _row_count(ids: Any) -> Any:
    """The number of rows as a tensor, where SGLang's kernels want it."""
    if not enable_num_token_non_padded():
        return None
    return torch.full((), ids.numel(), dtype=torch.int32, device=ids.device)


def _lengths(worker: HostWorker, batch: Any, entries: Any) -> tuple[Any, Any]:
    """Context lengths of the drafter's pass, exact on the device; on the host an upper bound that counts the block."""
    prefix, block = batch.seq_lens, int(worker.block_size)
    known = batch.seq_lens_cpu + block if batch.seq_lens_cpu is not None else batch.spec_info.nxt_kv_lens_cpu
    host = torch.empty(len(prefix), dtype=torch.int32, device="cpu")
    if not worker.use_compact_draft_cache:
        return prefix, host.copy_(known)
    worker._fill_compact_seq_lens_cpu_bound(
        batch_seq_lens_cpu=batch.seq_lens_cpu, nxt_kv_lens_cpu=batch.spec_info.nxt_kv_lens_cpu, out=host
    )
    lengths = worker._compute_compact_draft_seq_lens(prefix)
    worker._rebuild_compact_draft_cache(
        req_pool_indices=batch.req_pool_indices,
        prefix_lens=prefix,
        draft_prefix_lens=lengths,
        verify_out_cache_loc_2d=entries,
        bs=len(prefix),
        block_size=block,
    )
    return lengths, host


def _bind(worker: HostWorker, kv_plan: Any, forward_batch: Any, lengths: Any, lengths_cpu: Any) -> None:
    """Sets the K/V entries of the pass; a windowed drafter reads a table of its own."""
    reader = worker.draft_model_runner.kv_index_translator
    if worker.use_compact_draft_cache:
        block = int(worker.block_size)
        kv_plan = kv_plan.reads_from(reader, seq_lens=lengths, seq_lens_cpu=lengths_cpu, read_extent=block)
    kv_plan.bind(forward_batch, reader)


def _tokens(worker: HostWorker, output: Any, requests: int, block: int) -> Any:
    """Tokens [n, B - 1]: the argmax through the target's head, taken inside a captured graph or here."""
    if worker._draft_sampler is not None and output.can_run_graph:
        return worker._draft_sampler.out[: requests * (block - 1)].view(requests, block - 1)
    hidden = output.logits_output.hidden_states.view(requests, block, -1)[:, 1:]
    head = unwrap_lora_layer(worker.target_worker.model_runner.model.lm_head)
    with draft_scope(worker):
        tokens = worker._greedy_sample_from_vocab_parallel_head(
            hidden_states=hidden.reshape(-1, hidden.shape[-1]), lm_head=head
        )
    return tokens.view(requests, block - 1)
