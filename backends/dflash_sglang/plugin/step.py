"""A step that verifies the first `width` slots of a block, in SGLang's terms (after `DFlashWorkerV2`, 0.5.23).

Shapes: n requests, B slots in a drafted block, w = width slots verified, V the vocabulary. Every token has a K/V entry,
named by its index in SGLang's pools.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_utils import apply_dflash_verify_logits_adjustments
from sglang.srt.speculative.dflash_worker_v2 import _resolve_dflash_embedding_module
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_sampling_mask import SpeculativeSamplingMaskCapture
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from .host import HostWorker, draft_scope
from .penalties import Penalties
from .results import STEPS
from .states import WidthState, verifying


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


def _embeds(worker: HostWorker, ids: Any) -> Any:  # [n * B, H], by the target
    target = worker.target_worker.model_runner.model
    embeds = unwrap_lora_layer(_resolve_dflash_embedding_module(worker.draft_model, target))(ids)
    return (embeds * worker._noise_embed_scale).view(-1, embeds.shape[-1])


def _row_count(ids: Any) -> Any:  # SGLang's kernels want a tensor
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


class WidthStep:
    """One decoding step of a batch at one width.

    Args:
        state: what the target verifies with; None = SGLang's own, for whole blocks.
        penalties: the counts of the batch's penalised requests; None = it has none.
    """

    def __init__(
        self, worker: HostWorker, width: int, state: WidthState | None, *, penalties: Penalties | None = None
    ) -> None:
        self.worker, self.width, self.state, self.penalties = worker, width, state, penalties

    def run(self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None) -> Any:
        """Drafts, verifies, accepts, publishes and injects; gives SGLang's result."""
        worker, width, prefix, draft_input = self.worker, self.width, batch.seq_lens, batch.spec_info
        prefix.record_stream(torch.get_device_module(worker.device).current_stream())
        with STEPS.part("draft"):
            tokens = self._block(batch)
        with STEPS.part("verify"):
            tree = GrammarTree.from_linear_chain(tokens) if batch.has_grammar else None
            entries, kv_plan = block_entries(worker, batch, width)
            output = self._verify(batch, tokens, entries, kv_plan)
        logits = output.logits_output
        with STEPS.part("accept"):
            best = self._best(batch, logits)
            if best is None:
                self._constrain(batch, logits.next_token_logits, tokens, tree, grammar_barrier)
            _, gained, bonus, out_tokens = self._accept(batch, draft_input, tokens, logits, best)
        lengths = prefix + gained.to(prefix.dtype)
        if self.penalties is not None:
            self.penalties.settle(batch.reqs, tokens, gained)
        _report(batch, logits, draft_input, out_tokens, gained, width)
        if on_publish is not None:
            on_publish(lengths)
        with STEPS.part("inject"):
            self._inject(logits, kv_plan, prefix, gained)
        logits.hidden_states = None  # large, and not to be copied to the host
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

    def _block(self, batch: Any) -> Any:  # anchors and drafts; width 1 does not draft
        anchors = batch.spec_info.bonus_tokens.view(-1, 1)
        if self.width == 1:
            return anchors
        return torch.cat([anchors, draft_block(self.worker, batch)[:, : self.width - 1]], dim=1)

    def _verify(self, batch: Any, tokens: Any, entries: Any, kv_plan: Any) -> Any:
        """The target's pass over tokens [n, w]; gives its output, logits in shards of the vocabulary or whole."""
        draft_input, width, worker = batch.spec_info, self.width, self.worker
        verify_input = DFlashVerifyInput(
            draft_token=tokens.reshape(-1),
            positions=positions_of(batch.seq_lens, width).reshape(-1),
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
        with verifying(worker.model_runner, self.state):
            forward_batch, _ = verify_input.prepare_for_verify(batch, worker.target_worker)
            batch.seq_lens_cpu, batch.seq_lens_sum = saved
            return worker.target_worker.forward_batch_generation(
                batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
            )

    def _best(self, batch: Any, logits: Any) -> Any:
        """The target's own tokens [n * w] where ranks need to exchange no more; else None, and the logits are whole."""
        worker, gather = self.worker, self.worker._target_logits_processor
        if gather is None or not gather.is_deferred_shard(logits.next_token_logits):
            return None
        if self.penalties is None and worker._can_skip_verify_logits(batch, batch.sampling_info):
            best = gather.deferred_argmax(logits.next_token_logits)
            logits.next_token_logits = None
            return best
        logits.next_token_logits = gather.finish_deferred_gather(logits.next_token_logits)
        return None

    def _constrain(self, batch: Any, logits: Any, tokens: Any, tree: Any, barrier: Any) -> None:
        """Applies penalties, biases and the grammar to every slot's logits [n * w, V], in place."""
        mask = None
        if tree is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=tree,
                sampling_info=batch.sampling_info,
                device=logits.device,
                barrier=barrier,
            )
        if self.penalties is not None:
            self.penalties.constrain(batch.reqs, logits, tokens)
        if batch.sampling_info is not None:
            apply_dflash_verify_logits_adjustments(
                next_token_logits=logits, sampling_info=batch.sampling_info, draft_token_num=self.width
            )
        if mask is not None:
            mask.apply(logits)

    def _accept(self, batch: Any, draft_input: Any, tokens: Any, logits: Any, best: Any) -> tuple[Any, Any, Any, Any]:
        """Accepted drafts [n], tokens gained [n], the bonus tokens [n], and what was gained [n, w].

        `draft_input` is the batch's own of before the verification, which puts its input in that place
        (`DFlashVerifyInput.prepare_for_verify`); sampling reads top-k bounds from it.
        """
        with _judging(self.worker, self.width):
            accepted, gained, bonus, out_tokens, _ = self.worker._accept_block(
                candidates=tokens,
                next_token_logits=logits.next_token_logits,
                sampling_info=batch.sampling_info,
                draft_input=draft_input,
                prefix_lens=batch.seq_lens,
                bs=len(tokens),
                target_predict=best,
            )
        return accepted, gained, bonus, out_tokens

    def _inject(self, logits: Any, kv_plan: Any, prefix: Any, gained: Any) -> None:
        """Writes the drafter's K/V of the accepted rows at the target's own entries.

        A step that does not draft writes them, too: SGLang's radix cache hands these entries to later requests.
        """
        entries = self.worker._draft_write_ids(kv_plan)
        self.worker._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=logits.hidden_states,
            cache_loc=entries,
            cache_loc_2d=entries.view(-1, self.width),
            positions=positions_of(prefix, self.width).reshape(-1),
            commit_lens=gained,
        )


@contextmanager
def _judging(worker: HostWorker, width: int) -> Iterator[None]:
    """Lets SGLang's `_accept_block` judge blocks of `width` slots; its fused kernel's buffers are B wide."""
    saved = worker.block_size, worker._use_triton_accept_bonus
    if width != worker.block_size:
        worker.block_size, worker._use_triton_accept_bonus = width, False
    try:
        yield
    finally:
        worker.block_size, worker._use_triton_accept_bonus = saved


def _report(batch: Any, logits: Any, draft_input: Any, out_tokens: Any, gained: Any, width: int) -> None:
    """Adds to the logits' output what requests asked to see besides their tokens."""
    capture = SpeculativeSamplingMaskCapture.from_logits(
        batch.sampling_info,
        next_token_logits=logits.next_token_logits,
        draft_input=draft_input,
        draft_token_num=width,
        bs=len(batch.seq_lens),
    )
    if capture is not None:
        logits.sampling_mask_output = capture.build_output(out_tokens=out_tokens, commit_lens=gained)
    if batch.return_logprob:
        compute_spec_logprobs(batch, logits, out_tokens.reshape(-1), chain_stride=width)
