"""Every name of SGLang that the plug-in touches, in one place; looked up before any of them is used.

SGLang's plug-in interface is official, what stands below is not: a release that moves one of these is not supported
until it has been tested.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from dflash_serve.problem import Problem

from .release import installed, is_supported, release_problems, window

RESOLUTION = "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding"
RESOLVE_DFLASH = "sglang.srt.arg_groups.speculative_hook._handle_dflash"
CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
TOKENIZED = "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object"
RESULT = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
    "_resolve_spec_v2_tokens"
)
LOAD_WEIGHTS = "sglang.srt.models.dflash.DFlashDraftModel.load_weights"
WORKER = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"

NAMES = (
    RESOLUTION,
    RESOLVE_DFLASH,
    CREATE_WORKER,
    TOKENIZED,
    RESULT,
    LOAD_WEIGHTS,
    WORKER,
    "sglang.srt.arg_groups.overrides.resolving_view",
    "sglang.srt.plugins.hook_registry.HookRegistry.apply_hooks",
    "sglang.srt.runtime_context.get_parallel",
    "sglang.srt.speculative.dflash_utils.is_dflash_sampling_verify_available",
    "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2.forward_batch_generation",
    "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._accept_block",
    "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc",
    "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._draft_write_ids",
    "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._greedy_sample_from_vocab_parallel_head",
    "sglang.srt.speculative.dflash_worker_v2._resolve_dflash_embedding_module",
)
"""What is looked up when DFlash is asked for."""


def problems() -> Iterator[Problem]:
    """A version outside the window, or a name that has gone."""
    version = installed()
    yield from release_problems(version)
    if version is not None and is_supported(version):
        for name in NAMES:
            if not _exists(name):
                what = f"SGLang {version} has no {name}, though {window()} should"
                yield Problem(what, "sglang", "install SGLang again; it may have been changed")


def _exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def draft_scope(worker: Any) -> AbstractContextManager[Any]:
    """Where the drafter runs: its own tensor-parallel layout (0.5.22 only asks whether it owns its attention)."""
    from sglang.srt.speculative.spec_utils import draft_tp_context

    layout = getattr(worker, "draft_parallel_layout", None)
    scope: AbstractContextManager[Any] = draft_tp_context(worker.draft_owns_attention if layout is None else layout)
    return scope


def whole_logits(worker: Any, logits: Any) -> Any:
    """Logits of the whole vocabulary: 0.5.23 leaves them in shards after a verification, 0.5.22 never does."""
    gather = getattr(worker, "_target_logits_processor", None)
    if gather is not None and gather.is_deferred_shard(logits):
        return gather.finish_deferred_gather(logits)
    return logits
