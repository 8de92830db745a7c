"""Every name of SGLang that the plug-in imports or hooks, in one place; looked up before any of them is used.

SGLang's plug-in interface is official, what stands below is not: a release that moves one of these is not supported
until it has been tested. What we use of a built worker stands in `host`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator

from dflash_serve.errors import Problem
from dflash_sglang.facts import TESTED, installed_version, is_supported, release_problems

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


def upstream_problems(names: Iterable[str] = OF_MAIN) -> Iterator[Problem]:
    """A release that was not tested, or a name that has gone."""
    version = installed_version()
    yield from release_problems(version)
    if version is not None and is_supported(version):
        yield from (gone(name) for name in names if not _exists(name))


def gone(name: str) -> Problem:
    """That the installed SGLang lacks a name which its release has."""
    what = f"SGLang {installed_version() or 'unknown'} has no {name}, though {TESTED} should"
    return Problem(what, "sglang", "install SGLang again; it may have been changed")


def _exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
