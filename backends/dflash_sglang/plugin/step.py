"""A decoding step that verifies the first `width` slots of a block, in SGLang's terms (after `DFlashWorkerV2`, 0.5.23).

Blocks lie in the worker's own buffers, as in SGLang's steps. Every token has a K/V entry, named by its index in the
pools. Shapes: n requests, B slots in a drafted block, w = width slots verified, V the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.kernels.ops.speculative.dflash import _prepare_dflash_draft_block_unchecked
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.speculative.adaptive_runtime_state import SpecRuntimeState
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_utils import apply_dflash_verify_logits_adjustments
from sglang.srt.speculative.dflash_worker_v2 import _is_all_greedy, _resolve_dflash_embedding_module
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_sampling_mask import SpeculativeSamplingMaskCapture
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask, draft_tp_context

from .penalties import Penalties
from .startup import verifying


def run_step(
    worker: Any,
    batch: Any,
    width: int,
    state: SpecRuntimeState | None,
    *,
    penalties: Penalties | None = None,
    most: torch.Tensor | None = None,
    on_publish: Any = None,
    grammar_barrier: Any = None,
) -> Any:
    """Drafts, verifies, accepts, publishes and injects (at width 1, too: prefixes are reused); gives SGLang's result.

    Args:
        state: what the target verifies with; None = SGLang's own, for whole blocks.
        penalties: the counts of the batch's penalised requests; None = it has none.
        most: most tokens [n] that each request may gain; None = `width`.
    """
    prefix, draft_input = batch.seq_lens, batch.spec_info
    prefix.record_stream(torch.get_device_module(worker.device).current_stream())
    ids, positions, entries = _blocks(worker, batch)
    tokens, worker._selector_sample = draft_input.bonus_tokens[:, None], None
    if width > 1:
        tokens = torch.cat([tokens, _drafts(worker, batch, ids, positions, entries)[:, : width - 1]], dim=1)
    tree = GrammarTree.from_linear_chain(tokens) if batch.has_grammar else None
    positions, entries = positions[:, :width].reshape(-1), entries[:, :width].reshape(-1)
    kv_plan = _plan(worker, batch, entries, width)
    with verifying(worker.model_runner, state):
        output = _verify(worker, batch, tokens, positions, entries, kv_plan)
        logits = output.logits_output
        best = _best(worker, batch, logits, penalties)
        if best is None:
            _constrain(batch, logits.next_token_logits, tokens, penalties, tree, grammar_barrier)
        gained, bonus, out_tokens, lengths = _accept(worker, batch, draft_input, tokens, logits, best, most)
        worker._update_target_mamba_state_after_verify(  # the attention that verified knows where states lie
            batch=batch, seq_lens_pre_verify=prefix, seq_lens_post_verify=lengths, commit_lens=gained
        )
    if penalties is not None:
        penalties.settle(batch.reqs, tokens, gained)
    _report(batch, logits, draft_input, out_tokens, gained)
    if on_publish is not None:
        on_publish(lengths)
    _inject(worker, logits, kv_plan, positions, gained)
    return GenerationBatchResult(
        logits_output=logits,
        next_token_ids=out_tokens.reshape(-1),
        accept_lens=gained,
        can_run_cuda_graph=output.can_run_cuda_graph,
        next_draft_input=make_draft_input_v2(bonus_tokens=bonus, new_seq_lens=lengths),
        speculative_num_draft_tokens=width,
        new_seq_lens=lengths,
        routed_experts_output=output.routed_experts_output,
        indexer_topk_output=output.indexer_topk_output,
    )


def _inject(worker: Any, logits: Any, kv_plan: Any, positions: Any, gained: Any) -> None:
    """Writes the drafter's context K/V of the rows [n * width] that were verified, and lets go of their features."""
    entries = kv_plan.write_ids(worker.draft_model_runner.kv_index_translator)
    worker._append_target_hidden_to_draft_kv_by_loc(
        target_hidden=logits.hidden_states,
        cache_loc=entries,
        cache_loc_2d=entries.view(len(gained), -1),
        positions=positions,
        commit_lens=gained,
    )
    logits.hidden_states = None  # large, and not to be copied to the host


def _blocks(worker: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Ids (the anchors, then masks), positions and K/V entries of the blocks, [n, B] each."""
    requests = len(batch.seq_lens)
    worker._ensure_draft_block_buffers(requests)
    ids = worker._draft_block_ids_buf[:requests]
    positions = worker._draft_block_positions_buf[:requests]
    entries = worker._draft_verify_out_cache_loc_buf[:requests]
    _prepare_dflash_draft_block_unchecked(
        bonus_tokens=batch.spec_info.bonus_tokens,
        prefix_lens=batch.seq_lens,
        req_pool_indices=batch.req_pool_indices,
        req_to_token=worker.model_runner.req_to_token_pool.req_to_token,
        block_ids_out=ids,
        positions_out=positions,
        cache_loc_out=entries,
        mask_token_id=int(worker._mask_token_id),
    )
    return ids, positions, entries


def _plan(worker: Any, batch: Any, entries: Any, width: int) -> Any:
    """SGLang's plan of a pass over the entries [n * width]."""
    known = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else batch.spec_info.nxt_kv_lens_cpu
    return worker.model_runner.kv_index_translator.plan(
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        seq_lens_cpu=known,
        write_virtual=entries,
        read_extent=width,
    )


def _drafts(worker: Any, batch: Any, ids: Any, positions: Any, entries: Any) -> Any:
    """Drafts [n, B - 1] for slots 1..B-1 of every request's block: greedy, or drawn by DFlash2's selector, which leaves
    their probabilities in `worker._selector_sample`.
    """
    (requests, block), target = ids.shape, worker.target_worker.model_runner.model
    lengths, lengths_cpu = _draft_lengths(worker, batch, entries)
    embeds = _resolve_dflash_embedding_module(worker.draft_model, target)(ids)
    if worker._noise_embed_scale != 1.0:
        embeds = embeds * worker._noise_embed_scale
    count = None
    if enable_num_token_non_padded():  # SGLang's kernels want a tensor
        count = torch.full((), ids.numel(), dtype=torch.int32, device=ids.device)
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=requests,
        input_ids=ids.flatten(),
        req_pool_indices=batch.req_pool_indices,
        seq_lens=lengths,
        out_cache_loc=entries.view(-1),
        seq_lens_sum=int(lengths_cpu.sum()),
        seq_lens_cpu=lengths_cpu,
        positions=positions.view(-1),
        input_embeds=embeds.view(-1, embeds.shape[-1]),
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=worker._draft_block_spec_info,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        num_token_non_padded=count,
        global_num_token_non_padded_cpu=ids.numel(),
        can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
    )
    kv_plan, reader = _plan(worker, batch, entries.view(-1), block), worker.draft_model_runner.kv_index_translator
    if worker.use_compact_draft_cache:
        kv_plan = kv_plan.reads_from(reader, seq_lens=lengths, seq_lens_cpu=lengths_cpu, read_extent=block)
    kv_plan.bind(forward_batch, reader)
    sampler, sampling_info = worker._draft_sampler, batch.sampling_info
    if worker.selector is not None and sampler is not None:
        sampler.stage_sampling_params(bs=requests, sampling_info=sampling_info)
    with torch.inference_mode(), draft_tp_context(worker.draft_parallel_layout):
        output = worker.draft_model_runner.forward(forward_batch)
    if sampler is not None and output.can_run_graph:  # the graph chose the tokens
        if worker.selector is not None and not _is_all_greedy(sampling_info):
            worker._selector_sample = sampler.candidate_out[:requests], sampler.q_out[:requests]
        return sampler.out[: requests * (block - 1)].view(requests, block - 1)
    with draft_tp_context(worker.draft_parallel_layout):  # not inference_mode: SGLang keeps the buffers made here
        if worker.selector is not None:
            return worker._propose_selector_block(
                draft_logits_output=output.logits_output,
                bs=requests,
                lm_head=target.lm_head,
                anchor_token_ids=ids[:, 0],
                sampling_info=sampling_info,
            )
        hidden = output.logits_output.hidden_states.view(requests, block, -1)[:, 1:]
        tokens = worker._greedy_sample_from_vocab_parallel_head(
            hidden_states=hidden.reshape(-1, hidden.shape[-1]), lm_head=target.lm_head
        )
    return tokens.view(requests, block - 1)


def _draft_lengths(worker: Any, batch: Any, entries: Any) -> tuple[Any, Any]:
    """Context lengths of the drafter's pass, exact on the device; on the host an upper bound that counts the block."""
    (requests, block), prefix = entries.shape, batch.seq_lens
    known, host = batch.seq_lens_cpu, worker._draft_seq_lens_cpu_buf[:requests]
    if not worker.use_compact_draft_cache:
        return prefix, host.copy_(batch.spec_info.nxt_kv_lens_cpu if known is None else known + block)
    worker._fill_compact_seq_lens_cpu_bound(
        batch_seq_lens_cpu=known, nxt_kv_lens_cpu=batch.spec_info.nxt_kv_lens_cpu, out=host
    )
    lengths = worker._compute_compact_draft_seq_lens(prefix)
    worker._rebuild_compact_draft_cache(
        req_pool_indices=batch.req_pool_indices,
        prefix_lens=prefix,
        draft_prefix_lens=lengths,
        verify_out_cache_loc_2d=entries,
        bs=requests,
        block_size=block,
    )
    return lengths, host


def _verify(worker: Any, batch: Any, tokens: Any, positions: Any, entries: Any, kv_plan: Any) -> Any:
    """The target's pass over tokens [n, w]; gives its output, logits in shards of the vocabulary or whole."""
    draft_input, width = batch.spec_info, tokens.shape[1]
    verify_input = DFlashVerifyInput(
        draft_token=tokens.reshape(-1),
        positions=positions,
        draft_token_num=width,
        custom_mask=None,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        kv_loc_plan=kv_plan,
    )
    saved = batch.seq_lens_cpu, batch.seq_lens_sum
    if batch.seq_lens_cpu is not None:  # for planning, lengths count the block
        batch.seq_lens_cpu = batch.seq_lens_cpu + width
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    elif draft_input.nxt_kv_lens_cpu is not None:
        batch.seq_lens_cpu, batch.seq_lens_sum = draft_input.nxt_kv_lens_cpu, int(draft_input.nxt_kv_lens_sum)
    batch.out_cache_loc = entries
    forward_batch, _ = verify_input.prepare_for_verify(batch, worker.target_worker)
    batch.seq_lens_cpu, batch.seq_lens_sum = saved
    return worker.target_worker.forward_batch_generation(
        batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
    )


def _best(worker: Any, batch: Any, logits: Any, penalties: Penalties | None) -> Any:
    """The target's own tokens [n * w] where ranks need to exchange no more; else None, and the logits are whole."""
    gather = worker._target_logits_processor
    if gather is None or not gather.is_deferred_shard(logits.next_token_logits):
        return None
    if penalties is None and worker._can_skip_verify_logits(batch, batch.sampling_info):
        best = gather.deferred_argmax(logits.next_token_logits)
        logits.next_token_logits = None
        return best
    logits.next_token_logits = gather.finish_deferred_gather(logits.next_token_logits)
    return None


def _constrain(
    batch: Any, logits: Any, tokens: Any, penalties: Penalties | None, tree: GrammarTree | None, barrier: Any
) -> None:
    """Applies penalties, biases and the grammar to every slot's logits [n * w, V], in place."""
    mask, sampling_info = None, batch.sampling_info
    if tree is not None:
        mask = build_grammar_vocab_mask(
            reqs=batch.reqs, tree=tree, sampling_info=sampling_info, device=logits.device, barrier=barrier
        )
    if penalties is not None:
        penalties.constrain(batch.reqs, logits, tokens)
    if sampling_info is not None:
        apply_dflash_verify_logits_adjustments(
            next_token_logits=logits, sampling_info=sampling_info, draft_token_num=tokens.shape[1]
        )
    if mask is not None:
        mask.apply(logits)


def _accept(
    worker: Any, batch: Any, draft_input: Any, tokens: Any, logits: Any, best: Any, most: Any
) -> tuple[Any, Any, Any, Any]:
    """Tokens gained [n], bonus tokens [n], the tokens [n, w] and the new lengths [n], by SGLang's own acceptance.

    `draft_input` is the batch's own of before the verification, which puts its input in that place
    (`DFlashVerifyInput.prepare_for_verify`); sampling reads top-k bounds from it.
    """
    requests, width = tokens.shape
    worker._ensure_accept_bonus_buffers(requests)  # as wide as a whole block
    block, worker.block_size, whole = worker.block_size, width, worker._draft_probs_buf
    if worker._selector_sample is not None:
        worker._selector_sample = tuple(part[:, : width - 1] for part in worker._selector_sample)
        shape = requests, width - 1, logits.next_token_logits.shape[-1]
        whole, worker._draft_probs_buf = _cut_out(whole, shape, block - 1, tokens.device)
    try:
        _, gained, bonus, out_tokens, lengths = worker._accept_block(
            candidates=tokens,
            next_token_logits=logits.next_token_logits,
            sampling_info=batch.sampling_info,
            draft_input=draft_input,
            prefix_lens=batch.seq_lens,
            bs=requests,
            target_predict=best,
        )
    finally:
        worker.block_size, worker._draft_probs_buf = block, whole
    if most is not None:
        gained, bonus = _limited(gained, bonus, out_tokens, most)
        lengths = None  # they were those of all tokens
    return gained, bonus, out_tokens, batch.seq_lens + gained if lengths is None else lengths


def _limited(gained: Any, bonus: Any, out_tokens: Any, most: Any) -> tuple[Any, Any]:
    """Tokens gained [n] and bonus tokens [n] of requests that keep the first `most` [n] of their tokens [n, w].

    Every token of a block is the target's, given those before it, so the first ones are those of a narrower block.
    """
    kept = torch.minimum(gained, most.to(gained.dtype))
    return kept, out_tokens.gather(1, kept.long()[:, None] - 1)[:, 0].to(bonus.dtype)


def _cut_out(whole: Any, shape: tuple[int, int, int], slots: int, device: Any) -> tuple[Any, Any]:
    """SGLang's buffer of draft probabilities [requests, B - 1, V], large enough, and its first rows as [n, w - 1, V].

    Between steps it holds zeros alone, so a step may read any of its rows as those of any request. With B = 4, w = 3
    and three requests, two of its requests are enough:

        row                    0         1         2         3         4         5
        the buffer, [2, 3, V]  [0] 1     [0] 2     [0] 3     [1] 1     [1] 2     [1] 3       [request] slot
        cut out, [3, 2, V]     [0] 1     [0] 2     [1] 1     [1] 2     [2] 1     [2] 2

    The buffer grows in whole blocks. If it had another shape than SGLang expects, SGLang would double its requests.

    Args:
        whole: the buffer; None = SGLang has made none yet.
        shape: n, w - 1, V of this step.
        slots: B - 1.
    """
    requests, drafted, vocab = shape
    rows, has = requests * drafted, 0 if whole is None else len(whole)
    needs = -(-rows // slots)
    if has < needs:
        whole = torch.zeros((max(needs, 2 * has), slots, vocab), dtype=torch.float32, device=device)
    return whole, whole.view(-1, vocab)[:rows].view(shape)


def _report(batch: Any, logits: Any, draft_input: Any, out_tokens: Any, gained: Any) -> None:
    """Adds to the logits' output what requests asked to see besides their tokens."""
    requests, width = out_tokens.shape
    capture = SpeculativeSamplingMaskCapture.from_logits(
        batch.sampling_info,
        next_token_logits=logits.next_token_logits,
        draft_input=draft_input,
        draft_token_num=width,
        bs=requests,
    )
    if capture is not None:
        logits.sampling_mask_output = capture.build_output(out_tokens=out_tokens, commit_lens=gained)
    if batch.return_logprob:
        compute_spec_logprobs(batch, logits, out_tokens.reshape(-1), chain_stride=width)
