"""Names of SGLang 0.5.23 that we hook, and the attributes of its DFlash worker that our steps use.

SGLang promises none of them; tests/contract/test_sglang_names.py holds them, and every name that we import, against
the installed release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from dflash_serve.errors import Problem
from dflash_sglang.facts import RELEASES

RESOLUTION = "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding"
CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
WORKER = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"
RESULT = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
    "_resolve_spec_v2_tokens"
)
LOAD_WEIGHTS = "sglang.srt.models.dflash.DFlashDraftModel.load_weights"
QUEUE = "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue"
ROW_HEADROOM = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"


class HostWorker(Protocol):
    """Attributes of `DFlashWorkerV2`. Every one is annotated here, so that `worker_problems` can look it up."""

    block_size: int
    device: Any
    gpu_id: Any
    model_runner: Any
    target_worker: Any
    draft_model: Any
    draft_model_runner: Any
    draft_parallel_layout: Any
    use_compact_draft_cache: bool  # the drafter reads a short window of its context, by a table of its own
    selector: Any
    lilicorr: Any
    _is_domino: bool
    _mask_token_id: Any
    _noise_embed_scale: Any
    _draft_block_spec_info: Any
    _draft_sampler: Any
    _need_mamba_verify_commit: bool
    _prewarm_batch_size: Callable[[int], int]
    _target_logits_processor: Any
    _use_triton_accept_bonus: bool
    _accept_block: Callable[..., Any]
    _append_target_hidden_to_draft_kv_by_loc: Callable[..., Any]
    _can_skip_verify_logits: Callable[..., Any]
    _compute_compact_draft_seq_lens: Callable[..., Any]
    _draft_write_ids: Callable[..., Any]
    _ensure_draft_block_buffers: Callable[..., Any]
    _fill_compact_seq_lens_cpu_bound: Callable[..., Any]
    _greedy_sample_from_vocab_parallel_head: Callable[..., Any]
    _rebuild_compact_draft_cache: Callable[..., Any]
    _validate_phase1_sampling_support: Callable[..., Any]


def worker_problems(worker: HostWorker) -> Iterator[Problem]:
    """Attributes that a built worker lacks."""
    for name in HostWorker.__annotations__:
        if not hasattr(worker, name):
            what = f"SGLang {RELEASES.installed()}: {WORKER}.{name} is gone, tested {RELEASES}"
            yield Problem(what, "sglang", "install SGLang again; it may have been changed")


def draft_scope(worker: HostWorker) -> AbstractContextManager[Any]:
    """The context in which the drafter runs: its own tensor-parallel layout."""
    from sglang.srt.speculative.spec_utils import draft_tp_context

    scope: AbstractContextManager[Any] = draft_tp_context(worker.draft_parallel_layout)
    return scope
