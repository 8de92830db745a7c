"""A verification of the first `width` slots of a block, in SGLang's terms (after `DFlashWorkerV2`, 0.5.22-0.5.23).

Shapes: n requests, B slots in a drafted block, w = width slots verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_utils import apply_dflash_verify_logits_adjustments
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2
from sglang.srt.speculative.spec_sampling_mask import SpeculativeSamplingMaskCapture
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from .drafting import draft_block
from .states import verifying
from .upstream import whole_logits
from .window import positions_of, window

if TYPE_CHECKING:
    from .worker import DFlashServeWorker


def narrow_step(worker: DFlashServeWorker, batch: Any, width: int, on_publish: Any, grammar_barrier: Any) -> Any:
    """Draft, verify, accept, publish, inject: one decoding step of a batch; gives SGLang's result."""
    state, prefix = batch.spec_info, batch.seq_lens
    prefix.record_stream(torch.get_device_module(worker.device).current_stream())
    anchors = state.bonus_tokens.view(-1, 1)
    tokens = anchors if width == 1 else torch.cat([anchors, draft_block(worker, batch)[:, : width - 1]], dim=1)
    tree = GrammarTree.from_linear_chain(tokens) if batch.has_grammar else None
    slots, plan = window(worker, batch, width)
    output = _verify(worker, batch, tokens, slots, plan)
    logits = output.logits_output
    _constrain(worker, batch, logits, width, tree, grammar_barrier)
    with worker.judging(width):
        _, gained, bonus, out_tokens, _ = worker._accept_block(
            candidates=tokens,
            next_token_logits=logits.next_token_logits,
            sampling_info=batch.sampling_info,
            draft_input=state,
            prefix_lens=prefix,
            bs=len(prefix),
        )
    lengths = prefix + gained.to(prefix.dtype)
    _report(batch, logits, state, out_tokens, gained, width)
    if on_publish is not None:
        on_publish(lengths)
    _inject(worker, logits, plan, prefix, gained, width)
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


def _verify(worker: DFlashServeWorker, batch: Any, tokens: Any, slots: Any, plan: Any) -> Any:
    """The target's pass over [n, w] tokens."""
    state, width, prefix = batch.spec_info, tokens.shape[1], batch.seq_lens
    verify_input = DFlashVerifyInput(
        draft_token=tokens.reshape(-1),
        positions=positions_of(prefix, width).reshape(-1),
        draft_token_num=width,
        custom_mask=None,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        kv_loc_plan=plan,
    )
    saved = batch.seq_lens_cpu, batch.seq_lens_sum
    if batch.seq_lens_cpu is not None:  # for planning, lengths count the block
        batch.seq_lens_cpu = batch.seq_lens_cpu + width
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    elif state.nxt_kv_lens_cpu is not None:
        batch.seq_lens_cpu, batch.seq_lens_sum = state.nxt_kv_lens_cpu, int(state.nxt_kv_lens_sum)
    batch.out_cache_loc = slots
    with verifying(worker.model_runner, worker.states[width]):
        forward_batch, _ = verify_input.prepare_for_verify(batch, worker.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = saved
        output = worker.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
    logits = output.logits_output
    logits.next_token_logits = whole_logits(worker, logits.next_token_logits)
    return output


def _constrain(worker: DFlashServeWorker, batch: Any, logits: Any, width: int, tree: Any, barrier: Any) -> None:
    """Penalties, biases and the grammar, on every slot's logits, in place."""
    mask = None
    if tree is not None:
        mask = build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=tree,
            sampling_info=batch.sampling_info,
            device=logits.next_token_logits.device,
            barrier=barrier,
        )
    if batch.sampling_info is not None:
        apply_dflash_verify_logits_adjustments(
            next_token_logits=logits.next_token_logits, sampling_info=batch.sampling_info, draft_token_num=width
        )
    if mask is not None:
        mask.apply(logits.next_token_logits)


def _report(batch: Any, logits: Any, state: Any, out_tokens: Any, gained: Any, width: int) -> None:
    """What requests asked to see besides their tokens."""
    capture = SpeculativeSamplingMaskCapture.from_logits(
        batch.sampling_info,
        next_token_logits=logits.next_token_logits,
        draft_input=state,
        draft_token_num=width,
        bs=len(batch.seq_lens),
    )
    if capture is not None:
        logits.sampling_mask_output = capture.build_output(out_tokens=out_tokens, commit_lens=gained)
    if batch.return_logprob:
        compute_spec_logprobs(batch, logits, out_tokens.reshape(-1), chain_stride=width)


def _inject(worker: DFlashServeWorker, logits: Any, plan: Any, prefix: Any, gained: Any, width: int) -> None:
    """The drafter's context K/V of the rows that stand, at the target's own slots: prefixes stay reusable."""
    slots = worker._draft_write_ids(plan)
    worker._append_target_hidden_to_draft_kv_by_loc(
        target_hidden=logits.hidden_states,
        cache_loc=slots,
        cache_loc_2d=slots.view(-1, width),
        positions=positions_of(prefix, width).reshape(-1),
        commit_lens=gained,
    )
    logits.hidden_states = None  # large, and not to be copied to the host
