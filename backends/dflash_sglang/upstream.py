"""Every name of SGLang that the plug-in touches, in one place; looked up before any of them is used.

SGLang's plug-in interface is official, what stands below is not: a release that moves one of these is not supported
until it has been tested.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from dflash_serve.errors import Problem

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

OF_MAIN = (
    RESOLUTION,
    RESOLVE_DFLASH,
    CREATE_WORKER,
    TOKENIZED,
    "sglang.srt.arg_groups.overrides.resolving_view",
    "sglang.srt.plugins.hook_registry.HookRegistry",
    "sglang.srt.plugins.hook_registry.HookType",
    "sglang.srt.speculative.dflash_utils.is_dflash_sampling_verify_available",
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm",
    "sglang.srt.speculative.spec_registry.CustomSpecAlgo",
    "sglang.srt.speculative.spec_registry.get_spec",
)
"""What is used in the main process."""

OF_SCHEDULER = (
    RESULT,
    LOAD_WEIGHTS,
    WORKER,
    "sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs_func",
    "sglang.srt.layers.logprob_processor.compute_spec_logprobs",
    "sglang.srt.lora.layers.unwrap_lora_layer",
    "sglang.srt.managers.overlap_utils.FutureMap",
    "sglang.srt.managers.scheduler.GenerationBatchResult",
    "sglang.srt.model_executor.cuda_graph_config.Backend",
    "sglang.srt.model_executor.forward_batch_info.CaptureHiddenMode",
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
    "sglang.srt.model_executor.forward_batch_info.ForwardMode",
    "sglang.srt.model_executor.forward_batch_info.enable_num_token_non_padded",
    "sglang.srt.model_executor.model_runner.ModelRunner._decode_cuda_graph_runner_cls",
    "sglang.srt.model_executor.model_runner.ModelRunner._get_attention_backend",
    "sglang.srt.platforms.current_platform",
    "sglang.srt.runtime_context.get_exec",
    "sglang.srt.runtime_context.get_parallel",
    "sglang.srt.runtime_context.get_schedule",
    "sglang.srt.runtime_context.get_spec",
    "sglang.srt.speculative.dflash_info.DFlashVerifyInput",
    "sglang.srt.speculative.dflash_utils.apply_dflash_verify_logits_adjustments",
    "sglang.srt.speculative.dflash_worker_v2._resolve_dflash_embedding_module",
    "sglang.srt.speculative.draft_worker_common.make_draft_input_v2",
    "sglang.srt.speculative.spec_sampling_mask.SpeculativeSamplingMaskCapture",
    "sglang.srt.speculative.spec_utils.GrammarTree",
    "sglang.srt.speculative.spec_utils.build_grammar_vocab_mask",
    "sglang.srt.speculative.spec_utils.draft_tp_context",
    "sglang.srt.utils.get_available_gpu_memory",
)
"""What is used where the models are; looked up there, because importing it all takes seconds."""

OF_WORKER = (
    "_accept_block",
    "_append_target_hidden_to_draft_kv_by_loc",
    "_compute_compact_draft_seq_lens",
    "_draft_block_spec_info",
    "_draft_sampler",
    "_draft_write_ids",
    "_ensure_draft_block_buffers",
    "_fill_compact_seq_lens_cpu_bound",
    "_greedy_sample_from_vocab_parallel_head",
    "_mask_token_id",
    "_need_mamba_verify_commit",
    "_noise_embed_scale",
    "_rebuild_compact_draft_cache",
    "_use_triton_accept_bonus",
    "_validate_phase1_sampling_support",
    "draft_model",
    "draft_model_runner",
    "lilicorr",
    "model_runner",
    "selector",
    "target_worker",
    "use_compact_draft_cache",
)
"""What a built worker must have."""


def problems(names: Iterable[str] = OF_MAIN) -> Iterator[Problem]:
    """A version outside the window, or a name that has gone."""
    version = installed()
    yield from release_problems(version)
    if version is not None and is_supported(version):
        yield from (_gone(version, name) for name in names if not _exists(name))


def worker_problems(worker: Any) -> Iterator[Problem]:
    """What a built worker has not."""
    version = installed() or "unknown"
    yield from (_gone(version, f"{WORKER}.{name}") for name in OF_WORKER if not hasattr(worker, name))


def _gone(version: str, name: str) -> Problem:
    what = f"SGLang {version} has no {name}, though {window()} should"
    return Problem(what, "sglang", "install SGLang again; it may have been changed")


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
