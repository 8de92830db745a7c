"""`engine_args.tensorrt-llm`: options of `trtllm-serve` and keys of its config.yaml that we do not write.

A name of the command line becomes an option, any other a key of config.yaml, merged into ours. Options: trtllm-serve
@029e223; keys: `TorchLlmArgs` of `tensorrt_llm/llmapi/llm_args.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from pydantic import JsonValue

from dflash_serve.adapter.arguments import (
    ArgumentTable,
    EngineArgs,
    EngineParser,
    ParserNames,
    by_spelling,
    parser_problems,
    pinned_parser,
)
from dflash_serve.deployment.description import Serving
from dflash_serve.errors import Problem, did_you_mean

from .settings import TensorRTLLMSettings
from .upstream import FROM_1_4, NEW_IN_1_4, LlmArgs

LISTENING = "--host and --port of `dflash-serve serve`"
PLUG_IN = "dflash-serve writes it where the drafter needs it"
KEYS = {
    "host": LISTENING,
    "port": LISTENING,
    "backend": "DFlash runs in its PyTorch backend",
    "config": "engine_args take the place of a file",
    "custom_module_dirs": PLUG_IN,
    "max_batch_size": "limits.max_batch_size",
    "max_num_tokens": "limits.max_num_tokens",
    "max_seq_len": "limits.max_model_len",
    "tensor_parallel_size": "parallel.tensor",
    "pipeline_parallel_size": "parallel.pipeline",
    "context_parallel_size": "parallel.context",
    "moe_expert_parallel_size": "parallel.expert",
    "gpus_per_node": "parallel.nodes",
    "enable_attention_dp": "parallel.attention_data",
    "kv_cache_dtype": "kv_cache.dtype",
    "free_gpu_memory_fraction": "kv_cache.memory_fraction",
    "revision": "target.revision",
    "reasoning_parser": "serving.reasoning_parser",
    "tool_parser": "serving.tool_call_parser",
    "served_model_name": "serving.served_model_name",
    "otlp_traces_endpoint": "serving.otlp_traces_endpoint",
    "server_role": "halves of a disaggregated pair are not covered by this backend",
}
CONFIG_KEYS = {
    **{name: key for name, key in KEYS.items() if name in LlmArgs.model_fields},
    "enable_iter_perf_stats": "metrics are always on",
    "return_perf_metrics": "metrics are always on",
    "kv_cache_config.enable_block_reuse": "kv_cache.block_reuse",
    "kv_cache_config.free_gpu_memory_fraction": "kv_cache.memory_fraction",
    "kv_cache_config.dtype": "kv_cache.dtype",
    "cuda_graph_config.max_batch_size": "limits.max_batch_size",
    "speculative_config.decoding_type": "it follows from the drafter",
    "speculative_config.block_size": "speculation.block_size",
    "speculative_config.max_draft_len": "speculation.block_size",
    "speculative_config.speculative_model": "drafter.model",
    "speculative_config.mask_token_id": "the drafter's own description says it",
    "speculative_config.target_layer_ids": "the drafter's own description says it",
    "speculative_config.attention_backend": "it follows from hardware.gpu and the drafter",
}
"""Path in config.yaml -> the key of the Deployment that stands for it, or who else sets it."""
OTHER_CONFIG = (
    *("allreduce_strategy", "attention_dp_config", "attn_backend", "batch_wait_max_tokens_ratio"),
    *("batch_wait_timeout_iters", "batch_wait_timeout_ms", "cache_transceiver_config", "checkpoint_format"),
    *("checkpoint_io_policy", "cp_config", "custom_tokenizer", "disable_flashinfer_sampling", "disable_mm_encoder"),
    *("dwdp_config", "enable_autotuner", "enable_early_first_token_response", "enable_energy_metrics"),
    *("enable_in_graph_sampling", "enable_iter_req_stats", "enable_layerwise_nvtx_marker", "enable_lm_head_tp_in_adp"),
    *("enable_lora", "enable_low_latency_host_dispatch", "enable_min_latency", "enable_mla_skip_correction"),
    *("enable_resource_governor", "encoder_max_batch_size", "encoder_max_num_tokens", "env_overrides"),
    *("force_dynamic_quantization", "garbage_collection_gen0_threshold", "gather_generation_logits", "gms_config"),
    *("iter_stats_max_iterations", "kv_cache_compression_config", "kv_connector_config"),
    *("layer_wise_benchmarks_config", "load_format", "lora_config", "max_input_len", "max_stats_len"),
    *("mla_skip_correction_threshold", "moe_cluster_parallel_size", "moe_config", "moe_tensor_parallel_size"),
    *("multimodal_config", "mx_config", "nvfp4_gemm_config", "orchestrator_type", "otlp_traces_endpoint"),
    *("peft_cache_config", "perf_metrics_max_requests", "perf_metrics_output_dir", "postprocess_tokenizer_dir"),
    *("pp_partition", "prefill_capture_num_tokens", "prefill_cuda_graph_backend", "print_iter_log"),
    *("prometheus_metrics_config", "reorder_policy_config", "request_stats_max_iterations"),
    *("sampler_force_async_worker", "sampler_type", "scheduler_config", "sleep_config", "sparse_attention_config"),
    *("telemetry_config", "tokenizer_mode", "tokenizer_revision", "torch_compile_config", "use_cute_dsl_bf16_bmm"),
    *("use_cute_dsl_bf16_gemm", "use_cute_dsl_blockscaling_bmm", "use_cute_dsl_blockscaling_mm"),
    *("use_fine_grained_sync",),
)  # fmt: skip
"""Keys of config.yaml that our mirror does not have; their values are TensorRT-LLM's to check."""
OTHER_INNER = {
    "kv_cache_config": (
        *("attention_dp_events_gather_period_ms", "avg_seq_len", "block_reuse_config", "block_reuse_policy"),
        *("copy_on_partial_reuse", "cross_kv_cache_fraction", "disk_cache_path", "disk_cache_size"),
        *("disk_prefetch_num_reqs", "enable_kv_pool_rebalance", "enable_partial_reuse", "enable_swa_scratch_reuse"),
        *("event_buffer_max_size", "fp8_context_mla_kv_len_cap", "host_cache_size", "iteration_stats_interval"),
        *("kv_cache_event_hash_algo", "kv_events_config", "kv_pool_rebalance_check_interval"),
        *("kv_pool_rebalance_cooldown_secs", "kv_pool_rebalance_min_sampled_kv_caches"),
        *("kv_pool_rebalance_moving_average_decay", "kv_pool_rebalance_ratio_threshold"),
        *("kv_pool_rebalance_target_ratio_update_interval", "mamba_ssm_cache_dtype", "mamba_ssm_philox_rounds"),
        *("mamba_ssm_stochastic_rounding", "mamba_state_cache_interval", "mamba_state_config", "max_attention_window"),
        *("max_gpu_total_bytes", "max_util_for_resume", "pool_ratio", "secondary_offload_min_priority"),
        *("sink_token_length", "use_kv_cache_manager_v2", "use_uvm"),
    ),
    "cuda_graph_config": ("mode",),
    "speculative_config": (
        *("advanced_sampling_mode", "allow_advanced_sampling", "confidence_calibration_path"),
        *("confidence_cost_table_path", "confidence_min_predicted_gain", "enable_confidence_scheduling"),
        *("enable_fused_confidence_scheduler", "load_format", "moe_backend", "moe_tactic", "spec_dec_variant"),
    ),
}  # fmt: skip
"""Section of config.yaml -> its keys that our mirror does not have."""
IN_CONFIG = ("max_beam_width", "num_postprocess_workers", "trust_remote_code")
"""Options that are keys of config.yaml, as in NVIDIA's curated files: Dynamo has no such options, and reads that."""
PARSERS = ParserNames(
    reasoning={"deepseek_r1": "deepseek-r1", "minimax-m2": "minimax_m2"},
    tool_call={"qwen": "qwen3", "qwen25": "qwen3", "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31",
               "glm45": "glm4", "minimax-m2": "minimax_m2"},
)  # fmt: skip
"""Families that TensorRT-LLM calls otherwise."""
HARMONY = "gpt-oss"  # its answers are parsed by trtllm-serve itself, whatever parser is named


def own_arguments(*, drafter: bool) -> dict[str, str]:
    """Arguments that dflash-serve sets, with the key that sets each; with `drafter`, only those that a drafter adds."""
    whole = {name: key for name, key in CONFIG_KEYS.items() if "." not in name}
    return {} if drafter else {**whole, **by_spelling(_parser(), KEYS)}


def _parser() -> EngineParser:
    return pinned_parser(Path(__file__).with_name("flags.json"))


def argument_table(settings: TensorRTLLMSettings) -> ArgumentTable:
    """The options of trtllm-serve, from the pinned list."""
    return ArgumentTable("tensorrt-llm", f"TensorRT-LLM {settings.release}", _parser, KEYS)


PARSER_FLAGS = {"reasoning_parser": "reasoning_parser", "tool_call_parser": "tool_parser"}  # key of `serving` -> option


def named_parsers(settings: TensorRTLLMSettings) -> Serving:
    """Parsers that must be named; for gpt-oss trtllm-serve chooses its own."""
    serving = settings.deployment.serving
    its_own = settings.target.shape.model_type == "gpt_oss"
    chosen = {key: None for key in PARSER_FLAGS if its_own and getattr(serving, key) == HARMONY}
    return serving.model_copy(update=chosen)


def serving_options(settings: TensorRTLLMSettings) -> list[str]:
    """Names and parsers that clients see, and the user's own options, as words of the command line."""
    serving = settings.deployment.serving
    flags = {"served_model_name": serving.served_model_name, "otlp_traces_endpoint": serving.otlp_traces_endpoint}
    flags |= {PARSER_FLAGS[key]: parser for key, _, parser in PARSERS.of(named_parsers(settings))}
    words = [word for name, value in flags.items() if value is not None for word in (f"--{name}", value)]
    return [*words, *argument_table(settings).words(options(settings.engine_args))]


def serving_problems(settings: TensorRTLLMSettings) -> Iterator[Problem]:
    """Parsers of `serving` that trtllm-serve does not have."""
    yield from parser_problems(argument_table(settings), named_parsers(settings), PARSERS, PARSER_FLAGS)


def options(given: EngineArgs) -> dict[str, JsonValue]:
    """Arguments that are options of the command line."""
    parser = _parser() if given else None
    words = (name for name in given if name.replace("-", "_") not in IN_CONFIG)
    return {name: given[name] for name in words if parser and parser.action(name)}


def config_fields(given: EngineArgs) -> dict[str, JsonValue]:
    """Arguments that are keys of config.yaml."""
    words = options(given)
    return {name.replace("-", "_"): value for name, value in given.items() if name not in words}


def argument_problems(settings: TensorRTLLMSettings) -> Iterator[Problem]:
    """Arguments that trtllm-serve does not have, or that a key of the deployment stands for."""
    table, given = argument_table(settings), settings.engine_args
    yield from table.problems(options(given))
    known = {*LlmArgs.model_fields, *OTHER_CONFIG}
    for name, value in config_fields(given).items():
        where = f"{table.where}.{name}"
        if name not in known:
            do = did_you_mean(name, [*known, *table.parser().names]) or "see `trtllm-serve --help` and TorchLlmArgs"
            yield Problem(f"{table.engine} has no such option or key of config.yaml", where, do)
        for path in _paths(name, value):
            if path in NEW_IN_1_4 and settings.release < FROM_1_4:
                yield Problem(f"TensorRT-LLM {settings.release} has no {path}", where, "install 1.4, or leave it out")
            if path in CONFIG_KEYS and not (name == "speculative_config" and settings.deployment.drafter is None):
                key = CONFIG_KEYS[path]
                do = f"leave it out: {key}" if " " in key else f"set {key}"
                yield Problem(f"{path} is what dflash-serve sets itself", where, do)
        if name == "speculative_config" and value is None and settings.drafter is not None:
            yield Problem("null would leave the drafter out", where, "leave it out, or set speculation.width: off")


def _paths(name: str, value: JsonValue) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _paths(f"{name}.{key}", inner)
    else:
        yield name


def mirrored(fields: Mapping[str, object], names: Collection[str]) -> tuple[dict[str, object], dict[str, object]]:
    """Fields of config.yaml that our mirror checks, which are those of these names, and all others."""
    ours, others = dict[str, object](), dict[str, object]()
    for name, value in fields.items():
        if name not in names:
            others[name] = value
        elif isinstance(value, Mapping):
            inner = OTHER_INNER.get(name, ())
            ours[name] = {key: below for key, below in value.items() if key not in inner}
            others[name] = {key: below for key, below in value.items() if key in inner}
        else:
            ours[name] = value
    return ours, others


def merged(ours: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """config.yaml with the user's own keys, which are none of ours."""
    out = dict(ours)
    for key, value in given.items():
        below = out.get(key)
        out[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return out
