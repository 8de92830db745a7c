"""A step that verifies the first `width` slots of a block, in SGLang's terms (after `DFlashWorkerV2`, 0.5.22-0.5.23).

SGLang fixes the width of a verification in its attention and in its CUDA graphs when it makes them. So every narrow
width has its own of both, as in SGLang's adaptive EAGLE (`build_adaptive_runtime_state`): made once, swapped in for a
verification. Shapes: n requests, B slots in a drafted block, w = width slots verified.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_exec, get_spec
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_utils import apply_dflash_verify_logits_adjustments
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2
from sglang.srt.speculative.spec_sampling_mask import SpeculativeSamplingMaskCapture
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from sglang.srt.utils import get_available_gpu_memory

from .drafting import block_entries, draft_block, positions_of
from .host import HostWorker, whole_logits

logger = logging.getLogger(__name__)
ENOUGH_GB = 2.0
"""Free memory that the graphs of another width need; with less it runs without."""


@dataclass(frozen=True)
class WidthState:
    """What the target runs with while it verifies blocks of one width."""

    width: int
    attention: Any
    graphs: Any
    """None = launched kernel by kernel."""


def build_states(worker: HostWorker, widths: Iterable[int]) -> dict[int, WidthState]:
    """One for each width, by width; call it when SGLang has captured its own graphs."""
    return {width: _build(worker, width) for width in sorted(widths)}


def _build(worker: HostWorker, width: int) -> WidthState:
    runner = worker.model_runner
    workspace = runner.init_new_workspace
    with get_spec().override(speculative_num_draft_tokens=width):
        try:
            attention = runner._get_attention_backend(init_new_workspace=True)
        finally:
            runner.init_new_workspace = workspace
        return WidthState(width, attention, _capture(worker, attention, width) if _may_capture(worker) else None)


def _may_capture(worker: HostWorker) -> bool:
    if current_platform.is_out_of_tree() or get_exec().graph.cuda_graph_config.decode.backend == Backend.DISABLED:
        return False
    return bool(get_available_gpu_memory(worker.device, worker.gpu_id) > ENOUGH_GB)


def _capture(worker: HostWorker, attention: Any, width: int) -> Any:
    graphs = worker.model_runner._decode_cuda_graph_runner_cls()(
        worker.model_runner,
        attn_backend=attention,
        speculative_num_steps=1,
        speculative_num_draft_tokens=width,
    )
    logger.info("dflash-serve: captured CUDA graphs for width %d", width)
    return graphs


@contextmanager
def verifying(runner: Any, state: WidthState | None) -> Iterator[None]:
    """Lets the target verify with `state`; None = SGLang's own, for whole blocks."""
    saved = runner.attn_backend, runner.decode_cuda_graph_runner
    if state is not None:
        runner.attn_backend, runner.decode_cuda_graph_runner = state.attention, state.graphs
    try:
        yield
    finally:
        runner.attn_backend, runner.decode_cuda_graph_runner = saved


def narrow_step(
    worker: HostWorker, state: WidthState, batch: Any, on_publish: Any = None, grammar_barrier: Any = None
) -> Any:
    """Drafts, verifies, accepts, publishes and injects: one decoding step of a batch; gives SGLang's result."""
    draft_input, prefix, width = batch.spec_info, batch.seq_lens, state.width
    prefix.record_stream(torch.get_device_module(worker.device).current_stream())
    anchors = draft_input.bonus_tokens.view(-1, 1)
    tokens = anchors if width == 1 else torch.cat([anchors, draft_block(worker, batch)[:, : width - 1]], dim=1)
    tree = GrammarTree.from_linear_chain(tokens) if batch.has_grammar else None
    entries, kv_plan = block_entries(worker, batch, width)
    output = _verify(worker, state, batch, tokens, entries, kv_plan)
    logits = output.logits_output
    _constrain(worker, batch, logits, width, tree, grammar_barrier)
    with _judging(worker, width):
        _, gained, bonus, out_tokens, _ = worker._accept_block(
            candidates=tokens,
            next_token_logits=logits.next_token_logits,
            sampling_info=batch.sampling_info,
            draft_input=draft_input,
            prefix_lens=prefix,
            bs=len(prefix),
        )
    lengths = prefix + gained.to(prefix.dtype)
    _report(batch, logits, draft_input, out_tokens, gained, width)
    if on_publish is not None:
        on_publish(lengths)
    _inject(worker, logits, kv_plan, prefix, gained, width)
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


def _verify(worker: HostWorker, state: WidthState, batch: Any, tokens: Any, entries: Any, kv_plan: Any) -> Any:
    """The target's pass over tokens [n, w]; gives its output with the logits [n * w, V] of the whole vocabulary."""
    draft_input, width, prefix = batch.spec_info, state.width, batch.seq_lens
    verify_input = DFlashVerifyInput(
        draft_token=tokens.reshape(-1),
        positions=positions_of(prefix, width).reshape(-1),
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
    with verifying(worker.model_runner, state):
        forward_batch, _ = verify_input.prepare_for_verify(batch, worker.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = saved
        output = worker.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
    logits = output.logits_output
    logits.next_token_logits = whole_logits(worker, logits.next_token_logits)
    return output


def _constrain(worker: HostWorker, batch: Any, logits: Any, width: int, tree: Any, barrier: Any) -> None:
    """Applies penalties, biases and the grammar to every slot's logits, in place."""
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


@contextmanager
def _judging(worker: HostWorker, width: int) -> Iterator[None]:
    """Lets SGLang's `_accept_block` judge blocks of `width` slots; its fused kernel's buffers are B wide."""
    saved = worker.block_size, worker._use_triton_accept_bonus
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


def _inject(worker: HostWorker, logits: Any, kv_plan: Any, prefix: Any, gained: Any, width: int) -> None:
    """Writes the drafter's context K/V of the accepted rows at the target's own entries: prefixes stay reusable."""
    entries = worker._draft_write_ids(kv_plan)
    worker._append_target_hidden_to_draft_kv_by_loc(
        target_hidden=logits.hidden_states,
        cache_loc=entries,
        cache_loc_2d=entries.view(-1, width),
        positions=positions_of(prefix, width).reshape(-1),
        commit_lens=gained,
    )
    logits.hidden_states = None  # large, and not to be copied to the host
