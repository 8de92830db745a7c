"""Every name of SGLang that the plug-in imports, hooks or calls, with the parameters that it passes, is there.

SGLang's plug-in interface is official, the names below are not: a release that moves one of them is not supported until
it has been tested. Attributes of a built worker stand in `dflash_sglang.plugin.host`.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

import dflash_sglang.plugin
from dflash_sglang.plugin.host import CREATE_WORKER, LOAD_WEIGHTS, QUEUE, RESOLUTION, RESULT, ROW_HEADROOM, WORKER

PLUGIN = Path(dflash_sglang.plugin.__file__).parent


@dataclass(frozen=True)
class Foreign:
    """One name of SGLang."""

    path: str
    takes: tuple[str, ...] = ()
    """Parameters that we pass by these names."""
    returns: int | None = None
    """The length of the tuple that it returns."""

    def breach(self) -> str | None:
        """The part that does not hold in the installed release; None = all of it holds."""
        try:
            found = pkgutil.resolve_name(self.path)
            parameters = inspect.signature(found).parameters if self.takes else {}
            lengths = {self.returns} if self.returns is None else _tuple_lengths(found)
        except Exception as error:  # whatever a module of another release raises while it is imported
            return f"{self.path} is gone ({type(error).__name__})"
        missing = [name for name in self.takes if name not in parameters]
        if missing:
            return f"{self.path} takes no {', '.join(missing)}"
        return None if lengths == {self.returns} else f"{self.path} no longer returns {self.returns} values"


def _tuple_lengths(function: object) -> set[int]:
    """Lengths of the tuples that a function returns."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))  # type: ignore[arg-type]
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    return {len(value.elts) for value in returned if isinstance(value, ast.Tuple)}


IN_MAIN = (
    Foreign(RESOLUTION, ("server_args",)),
    Foreign(CREATE_WORKER, ("server_args",)),
    Foreign("sglang.srt.arg_groups.overrides.resolving_view"),
    Foreign("sglang.srt.plugins.hook_registry.HookRegistry"),
    Foreign("sglang.srt.plugins.hook_registry.HookType"),
    Foreign("sglang.srt.plugins.hook_registry.HookRegistry.register", ("target", "hook", "hook_type")),
    Foreign("sglang.srt.plugins.hook_registry.HookRegistry.apply_hooks"),
)

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
_PLAN = "sglang.srt.mem_cache.kv_loc_plan.KVLocPlan"
_LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor"
_BATCH = (
    *("forward_mode", "batch_size", "input_ids", "req_pool_indices", "seq_lens", "out_cache_loc", "seq_lens_sum"),
    *("seq_lens_cpu", "positions", "input_embeds", "spec_algorithm", "spec_info", "capture_hidden_mode"),
    *("num_token_non_padded", "global_num_token_non_padded_cpu", "can_run_decode_cuda_graph"),
)

IN_SCHEDULER = (
    Foreign(RESULT, ("result", "batch")),
    Foreign(LOAD_WEIGHTS, ("weights",)),
    Foreign(QUEUE, ("req", "is_retracted")),
    Foreign(ROW_HEADROOM),
    Foreign("sglang.srt.mem_cache.allocation_sizing.get_alloc_page_size"),
    Foreign("sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode"),
    Foreign(
        "sglang.srt.managers.schedule_batch.Req",
        ("rid", "origin_input_text", "origin_input_ids", "sampling_params"),
    ),
    Foreign("sglang.srt.managers.schedule_batch.Req.set_finish_with_abort", ("error_msg",)),
    Foreign(
        "sglang.srt.managers.schedule_batch.ScheduleBatch",
        (
            *("reqs", "device", "req_pool_indices", "seq_lens", "seq_lens_cpu", "orig_seq_lens"),
            *("multimodal_inputs", "forward_mode", "spec_algorithm", "spec_info", "can_run_decode_cuda_graph"),
        ),
    ),
    Foreign(f"{_RUNNER}.recapture_decode_cuda_graph"),
    Foreign(WORKER, ("server_args", "gpu_id", "nccl_port", "target_worker")),
    Foreign(f"{WORKER}.init_cuda_graphs"),
    Foreign(f"{WORKER}.forward_batch_generation", ("batch", "on_publish", "grammar_barrier", "pp_proxy_tensors")),
    Foreign(f"{WORKER}.note_request_finished", ("rid", "natural_stop")),
    Foreign(
        f"{WORKER}._accept_block",
        (
            *("candidates", "next_token_logits", "sampling_info", "draft_input"),
            *("prefix_lens", "bs", "target_predict"),
        ),
        returns=5,
    ),
    Foreign(
        f"{WORKER}._append_target_hidden_to_draft_kv_by_loc",
        ("target_hidden", "cache_loc", "cache_loc_2d", "positions", "commit_lens"),
    ),
    Foreign(f"{WORKER}._can_skip_verify_logits", ("batch", "sampling_info")),
    Foreign(f"{WORKER}._draft_write_ids", ("plan",)),
    Foreign(
        f"{WORKER}._fill_compact_seq_lens_cpu_bound",
        ("batch_seq_lens_cpu", "nxt_kv_lens_cpu", "out"),
    ),
    Foreign(f"{WORKER}._greedy_sample_from_vocab_parallel_head", ("hidden_states", "lm_head")),
    Foreign(
        f"{WORKER}._rebuild_compact_draft_cache",
        (
            *("req_pool_indices", "prefix_lens", "draft_prefix_lens"),
            *("verify_out_cache_loc_2d", "bs", "block_size"),
        ),
    ),
    Foreign(
        "sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs_func",
        (
            *("req_pool_indices", "req_to_token", "start_offset", "end_offset"),
            *("batch_size", "draft_token_num", "device"),
        ),
    ),
    Foreign(
        "sglang.srt.layers.logprob_processor.compute_spec_logprobs",
        ("batch", "logits_output", "predict", "chain_stride"),
    ),
    Foreign(f"{_LOGITS}.is_deferred_shard", ("logits",)),
    Foreign(f"{_LOGITS}.finish_deferred_gather", ("logits",)),
    Foreign(f"{_LOGITS}.deferred_argmax", ("logits",)),
    Foreign("sglang.srt.lora.layers.unwrap_lora_layer"),
    Foreign(
        "sglang.srt.managers.scheduler.GenerationBatchResult",
        (
            *("logits_output", "next_token_ids", "accept_lens", "can_run_cuda_graph", "next_draft_input"),
            *("speculative_num_draft_tokens", "new_seq_lens", "routed_experts_output", "indexer_topk_output"),
        ),
    ),
    Foreign(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        ("batch", "forward_batch", "is_verify", "skip_attn_backend_init"),
    ),
    Foreign(
        "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.plan",
        ("req_pool_indices", "seq_lens", "seq_lens_cpu", "write_virtual", "read_extent"),
    ),
    Foreign(f"{_PLAN}.reads_from", ("source", "seq_lens", "seq_lens_cpu", "read_extent")),
    Foreign(f"{_PLAN}.bind", ("batch", "reader")),
    Foreign("sglang.srt.model_executor.cuda_graph_config.Backend.DISABLED"),
    Foreign("sglang.srt.model_executor.cuda_graph_config.Backend"),
    Foreign("sglang.srt.model_executor.forward_batch_info.CaptureHiddenMode"),
    Foreign("sglang.srt.model_executor.forward_batch_info.ForwardBatch", _BATCH),
    Foreign("sglang.srt.model_executor.forward_batch_info.ForwardMode"),
    Foreign("sglang.srt.model_executor.forward_batch_info.enable_num_token_non_padded"),
    Foreign(f"{_RUNNER}._decode_cuda_graph_runner_cls"),
    Foreign(f"{_RUNNER}._get_attention_backend", ("init_new_workspace",)),
    Foreign(f"{_RUNNER}.forward", ("forward_batch",)),
    Foreign(_GRAPHS, ("model_runner", "attn_backend", "speculative_num_steps", "speculative_num_draft_tokens")),
    Foreign(f"{_GRAPHS}.can_run_graph", ("forward_batch",)),
    Foreign(f"{_GRAPHS}.load_batch", ("forward_batch",)),
    Foreign("sglang.srt.platforms.current_platform.is_out_of_tree"),
    Foreign("sglang.srt.platforms.current_platform.capabilities.graph_capture"),
    Foreign("sglang.srt.platforms.current_platform"),
    Foreign("sglang.srt.runtime_context.get_disagg"),
    Foreign("sglang.srt.runtime_context.get_exec"),
    Foreign("sglang.srt.runtime_context.get_parallel"),
    Foreign("sglang.srt.runtime_context.get_schedule"),
    Foreign("sglang.srt.runtime_context.get_spec"),
    Foreign(
        "sglang.srt.speculative.dflash_info.DFlashVerifyInput",
        ("draft_token", "positions", "draft_token_num", "custom_mask", "capture_hidden_mode", "kv_loc_plan"),
    ),
    Foreign(
        "sglang.srt.speculative.dflash_info.DFlashVerifyInput.prepare_for_verify",
        ("batch", "target_worker"),
        returns=2,
    ),
    Foreign(
        "sglang.srt.speculative.dflash_utils.apply_dflash_verify_logits_adjustments",
        ("next_token_logits", "sampling_info", "draft_token_num"),
    ),
    Foreign("sglang.srt.speculative.dflash_utils.is_dflash_sampling_verify_available"),
    Foreign("sglang.srt.speculative.dflash_worker_v2._resolve_dflash_embedding_module"),
    Foreign(WORKER),
    Foreign("sglang.srt.speculative.draft_worker_common.make_draft_input_v2", ("bonus_tokens", "new_seq_lens")),
    Foreign("sglang.srt.sampling.sampling_params.SamplingParams", ("temperature",)),
    Foreign("sglang.srt.speculative.spec_info.SpeculativeAlgorithm"),
    Foreign(
        "sglang.srt.speculative.spec_sampling_mask.SpeculativeSamplingMaskCapture.from_logits",
        ("next_token_logits", "draft_input", "draft_token_num", "bs"),
    ),
    Foreign("sglang.srt.speculative.spec_sampling_mask.SpeculativeSamplingMaskCapture"),
    Foreign("sglang.srt.speculative.spec_utils.GrammarTree"),
    Foreign("sglang.srt.speculative.spec_utils.GrammarTree.from_linear_chain"),
    Foreign(
        "sglang.srt.speculative.spec_utils.build_grammar_vocab_mask",
        ("reqs", "tree", "sampling_info", "device", "barrier"),
    ),
    Foreign("sglang.srt.speculative.spec_utils.draft_tp_context"),
    Foreign("sglang.srt.utils.get_available_gpu_memory", ("device", "gpu_id")),
)


@pytest.mark.parametrize("name", [*IN_MAIN, *IN_SCHEDULER], ids=lambda name: name.path)
def test_the_installed_sglang_has_it(name: Foreign) -> None:
    pytest.importorskip("sglang")
    assert name.breach() is None


def test_every_name_that_the_plug_in_imports_is_listed() -> None:
    nodes = [node for path in PLUGIN.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang")]
    imported = {f"{node.module}.{name.name}" for node in froms for name in node.names}
    assert imported - {name.path for name in (*IN_MAIN, *IN_SCHEDULER)} == set()


def test_a_name_that_has_gone_changed_or_gives_another_tuple_is_a_breach() -> None:
    assert Foreign("os.path.join").breach() is None
    assert Foreign("os.path.gone").breach() == "os.path.gone is gone (AttributeError)"
    assert Foreign("json.dumps", ("obj", "colour")).breach() == "json.dumps takes no colour"
    assert Foreign("ast.walk", returns=5).breach() == "ast.walk no longer returns 5 values"
