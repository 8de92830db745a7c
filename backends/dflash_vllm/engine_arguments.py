"""Which arguments `vllm serve` takes, and which of them a key of the Deployment stands for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from pathlib import Path

from dflash_serve.adapter.arguments import (
    ArgumentTable,
    EngineParser,
    ParserNames,
    by_spelling,
    own_parser,
    pinned_parser,
)

from .facts import RELEASES
from .settings import VLLMSettings

PINNED = Path(__file__).with_name("flags.json")
"""The flags of vLLM 0.32.0 as its own parser describes them, and the parsers of answers that it registers."""
PINNED_RELEASE = "0.32.0"
COMMAND_LINE: Mapping[tuple[int, ...] | None, str] = {
    (0, 32): "vllm.entrypoints.launchers.cli_args",
    (0, 33): "vllm.entrypoints.common.cli_args",
}
"""Supported release -> its module with `make_arg_parser`."""
SPECULATION = "`speculation` and `drafter` say how it drafts"
LISTENING = "--host and --port of `dflash-serve serve`"
COPIES = "parallel.data"
NODES = "this backend serves on one node"
OWN_CONFIG = "the checks read the target's own config.json: change it there"
KEYS = {
    "model": "target.model",
    "revision": "target.revision",
    "quantization": "target.quantization",
    "dtype": "hardware.dtype",
    "kv_cache_dtype": "kv_cache.dtype",
    "enable_prefix_caching": "kv_cache.block_reuse",
    "tensor_parallel_size": "parallel.tensor",
    "pipeline_parallel_size": "parallel.pipeline",
    "enable_expert_parallel": "parallel.expert",
    "decode_context_parallel_size": "parallel.context",
    "prefill_context_parallel_size": "parallel.context",
    "data_parallel_size": COPIES,
    "data_parallel_size_local": COPIES,
    "data_parallel_rank": COPIES,
    "data_parallel_start_rank": COPIES,
    "data_parallel_hybrid_lb": COPIES,
    "data_parallel_external_lb": COPIES,
    "nnodes": NODES,
    "node_rank": NODES,
    "max_num_seqs": "limits.max_batch_size",
    "max_num_queued_reqs": "limits.max_queued_requests",
    "max_model_len": "limits.max_model_len",
    **dict.fromkeys(("hf_overrides", "hf_config_path", "config_format", "model_class_overrides"), OWN_CONFIG),
    "quantization_config": "target.quantization",
    "max_num_batched_tokens": "limits.max_num_tokens",
    "max_num_scheduled_tokens": "limits.max_num_tokens",
    "served_model_name": "serving.served_model_name",
    "api_key": "serving.api_key_file",
    "reasoning_parser": "serving.reasoning_parser",
    "tool_call_parser": "serving.tool_call_parser",
    "enable_auto_tool_choice": "serving.tool_call_parser",
    "log_config_file": "serving.log_format",
    "otlp_traces_endpoint": "serving.otlp_traces_endpoint",
    "host": LISTENING,
    "port": LISTENING,
    "uds": LISTENING,
    "config": "engine_args take the place of a file",
    **dict.fromkeys(("generation_config", "override_generation_config"), "requests alone say how they are sampled"),
    "disable_log_stats": "metrics are always on",
}
"""Kernels are not among them: where none is given, vLLM chooses the target's."""
OF_OUR_DRAFTER = {
    "speculative_config": SPECULATION,
    "spec_method": SPECULATION,
    "spec_model": "drafter.model",
    "spec_tokens": "speculation.block_size",
    "api_server_count": "one front-end counts the steps of speculation",
}
"""Without one of ours, they are the user's."""
OUR_SCHEDULER = dict.fromkeys(("scheduler_cls", "async_scheduling"), "`width: auto` needs our scheduler")
PARSERS = ParserNames(
    reasoning={"gpt-oss": "openai_gptoss", "deepseek-r1": "deepseek_r1", "qwen3_5": "qwen3", "kimi_k25": "kimi_k2"},
    tool_call={"gpt-oss": "openai", "qwen3": "hermes", "qwen": "hermes", "qwen25": "hermes", "llama3": "llama3_json",
               "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "deepseekv32": "deepseek_v32",
               "minimax-m2": "minimax_m2"},
)  # fmt: skip
"""Families that vLLM calls otherwise."""
PARSER_FLAGS = {"reasoning_parser": "reasoning-parser", "tool_call_parser": "tool-call-parser"}
"""Key of `serving` -> flag."""


def own_arguments(*, drafter: bool) -> dict[str, str]:
    """Arguments that dflash-serve sets, with the key that sets each; with `drafter`, only those that a drafter adds."""
    return by_spelling(pinned_parser(PINNED), OF_OUR_DRAFTER if drafter else KEYS)


def argument_table(settings: VLLMSettings) -> ArgumentTable:
    """The table for a deployment: what is not set by a key may be given as an argument."""
    keys = dict(KEYS) if settings.deployment.drafter is None else KEYS | OF_OUR_DRAFTER
    if settings.deployment.kv_cache.memory_fraction is not None:
        keys["gpu_memory_utilization"] = "kv_cache.memory_fraction"
    if settings.is_half:
        keys["kv_transfer_config"] = "role"
    if settings.has_our_scheduler:
        keys |= OUR_SCHEDULER
    version = RELEASES.installed()
    known = version if RELEASES.supports(version) else PINNED_RELEASE
    return ArgumentTable("vllm", f"vLLM {known}", _parser, keys)


@cache
def _parser() -> EngineParser:
    """The installed vLLM's own; the pinned one if none is installed, or a release that is not supported."""
    command_line = COMMAND_LINE.get(RELEASES.numbers(RELEASES.installed()))
    if command_line is None or RELEASES.import_problem():
        return pinned_parser(PINNED)
    return own_parser("vLLM", lambda: _installed(command_line), PINNED)


def _installed(command_line: str) -> EngineParser:
    with redirect_stdout(sys.stderr):  # where vLLM's log goes as soon as it is imported; ours is for our answers
        flexible = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
        parser: EngineParser = type("VLLMParser", (EngineParser, flexible), {})()
        import_module(command_line).make_arg_parser(parser)
        registered = {
            "tool-call-parser": import_module("vllm.tool_parsers").ToolParserManager.list_registered(),
            "reasoning-parser": import_module("vllm.reasoning").ReasoningParserManager.list_registered(),
        }
    for flag, names in registered.items():
        action = parser.action(flag)
        assert action is not None
        action.choices = sorted(names)
    return parser
