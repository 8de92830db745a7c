"""The drafter's pass over full blocks, in SGLang's terms (after `DFlashWorkerV2`, 0.5.22-0.5.23)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.speculative.dflash_worker_v2 import _resolve_dflash_embedding_module
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from .upstream import draft_scope
from .window import positions_of, window

if TYPE_CHECKING:
    from .worker import DFlashServeWorker


def draft_block(worker: DFlashServeWorker, batch: Any) -> Any:
    """Greedy drafts [n, B - 1] for slots 1..B-1 of every request's block."""
    block, prefix = int(worker.block_size), batch.seq_lens
    worker._ensure_draft_block_buffers(len(prefix))
    slots, plan = window(worker, batch, block)
    ids = torch.full((len(prefix), block), int(worker._mask_token_id), dtype=torch.int64, device=prefix.device)
    ids[:, 0] = batch.spec_info.bonus_tokens
    lengths, lengths_cpu = _lengths(worker, batch, slots.view(-1, block))
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(prefix),
        input_ids=ids.flatten(),
        req_pool_indices=batch.req_pool_indices,
        seq_lens=lengths,
        out_cache_loc=slots,
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
    _bind(worker, plan, forward_batch, lengths, lengths_cpu)
    with torch.inference_mode(), draft_scope(worker):
        output = worker.draft_model_runner.forward(forward_batch)
    return _tokens(worker, output, len(prefix), block)


def _embeds(worker: DFlashServeWorker, ids: Any) -> Any:
    """The target's embedding of the blocks, [n * B, H]."""
    target = worker.target_worker.model_runner.model
    embeds = unwrap_lora_layer(_resolve_dflash_embedding_module(worker.draft_model, target))(ids)
    return (embeds * worker._noise_embed_scale).view(-1, embeds.shape[-1])


def _row_count(ids: Any) -> Any:
    if not enable_num_token_non_padded():
        return None
    return torch.full((), ids.numel(), dtype=torch.int32, device=ids.device)


def _lengths(worker: DFlashServeWorker, batch: Any, slots: Any) -> tuple[Any, Any]:
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
        verify_out_cache_loc_2d=slots,
        bs=len(prefix),
        block_size=block,
    )
    return lengths, host


def _bind(worker: DFlashServeWorker, plan: Any, forward_batch: Any, lengths: Any, lengths_cpu: Any) -> None:
    """Gives the pass its K/V slots; a windowed drafter reads a table of its own."""
    reader = worker.draft_model_runner.kv_index_translator
    if worker.use_compact_draft_cache:
        block = int(worker.block_size)
        plan = plan.reads_from(reader, seq_lens=lengths, seq_lens_cpu=lengths_cpu, read_extent=block)
    plan.bind(forward_batch, reader)


def _tokens(worker: DFlashServeWorker, output: Any, requests: int, block: int) -> Any:
    """Argmax through the target's head: done inside a captured graph, or here."""
    if worker._draft_sampler is not None and output.can_run_graph:
        return worker._draft_sampler.out[: requests * (block - 1)].view(requests, block - 1)
    hidden = output.logits_output.hidden_states.view(requests, block, -1)[:, 1:]
    head = unwrap_lora_layer(worker.target_worker.model_runner.model.lm_head)
    with draft_scope(worker):
        tokens = worker._greedy_sample_from_vocab_parallel_head(
            hidden_states=hidden.reshape(-1, hidden.shape[-1]), lm_head=head
        )
    return tokens.view(requests, block - 1)
