"""Which arguments SGLang's server takes, and which of them a key of the Deployment stands for."""

from __future__ import annotations

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
from dflash_serve.deployment.description import Deployment

from .facts import RELEASES

PINNED = Path(__file__).with_name("flags.json")
"""The flags of SGLang 0.5.23 as its own parser describes them: names, values, types, choices."""
SPECULATION = "`speculation` and `drafter` say how it drafts"
LISTENING = "--host and --port of `dflash-serve serve`"
NODES = "it follows from parallel.nodes and the environment of the pod"
OWN_CONFIG = "the checks read the target's own config.json: change it there"
KEYS = {
    "model_path": "target.model",
    "revision": "target.revision",
    "quantization": "target.quantization",
    "dtype": "hardware.dtype",
    "kv_cache_dtype": "kv_cache.dtype",
    "disable_radix_cache": "kv_cache.block_reuse",
    "tp_size": "parallel.tensor",
    "dp_size": "parallel.data",
    "ep_size": "parallel.expert",
    "pp_size": "parallel.pipeline",
    "attn_dp_size": "parallel.attention_data",
    "enable_dp_attention": "parallel.attention_data",
    "enable_dp_lm_head": "parallel.attention_data",
    "max_running_requests": "limits.max_batch_size",
    "max_queued_requests": "limits.max_queued_requests",
    "context_length": "limits.max_model_len",
    **dict.fromkeys(("json_model_override_args", "decrypted_config_file", "model_config_parser"), OWN_CONFIG),
    "decrypted_draft_config_file": "dflash-serve writes the drafter's config.json",
    "modelopt_quant": "target.quantization",
    "chunked_prefill_size": "limits.max_num_tokens",
    "served_model_name": "serving.served_model_name",
    "api_key": "serving.api_key_file",
    "reasoning_parser": "serving.reasoning_parser",
    "tool_call_parser": "serving.tool_call_parser",
    "enable_trace": "serving.otlp_traces_endpoint",
    "otlp_traces_endpoint": "serving.otlp_traces_endpoint",
    "disaggregation_mode": "role",
    "host": LISTENING,
    "port": LISTENING,
    "nnodes": NODES,
    "node_rank": NODES,
    "dist_init_addr": NODES,
    "config": "engine_args take the place of a file",
    "enable_metrics": "metrics are always on",
    "sampling_defaults": "it follows from the target's generation_config.json",
}
"""Kernels and the drafter's K/V format are not among them: we choose where none is given."""
OF_OUR_DRAFTER = {
    "speculative_algorithm": SPECULATION,
    "speculative_draft_model_path": "drafter.model",
    "speculative_draft_model_revision": "drafter.revision",
    "speculative_num_draft_tokens": "speculation.block_size",
    "speculative_dflash_block_size": "speculation.block_size",
    "speculative_dspark_block_size": "speculation.block_size",
    "speculative_num_steps": SPECULATION,
    "speculative_eagle_topk": SPECULATION,
    "speculative_adaptive": "SGLang has it for EAGLE only",
    "speculative_adaptive_config": "SGLang has it for EAGLE only",
    "speculative_draft_sink_size": "SGLang's DFLASH ignores it",
    "speculative_draft_window_size": "speculation.draft_window",
    "speculative_draft_model_quantization": "the drafter is served in bfloat16",
}
"""Without one of ours, they are the user's."""
PARSERS = ParserNames(
    reasoning={"qwen3_5": "qwen3", "deepseek_r1": "deepseek-r1"},
    tool_call={"qwen3": "qwen", "hermes": "hermes", "deepseek_v3": "deepseekv3", "deepseek_v31": "deepseekv31",
               "llama3_json": "llama3", "deepseek_v32": "deepseekv32", "minimax_m2": "minimax-m2"},
)  # fmt: skip
"""Families that SGLang calls otherwise."""


def own_arguments(*, drafter: bool) -> dict[str, str]:
    """Arguments that dflash-serve sets, with the key that sets each; with `drafter`, only those that a drafter adds."""
    return by_spelling(pinned_parser(PINNED), OF_OUR_DRAFTER if drafter else KEYS)


def argument_table(deployment: Deployment) -> ArgumentTable:
    """The table for a deployment: what is not set by a key may be given as an argument."""
    keys = KEYS if deployment.drafter is None else KEYS | OF_OUR_DRAFTER
    if deployment.kv_cache.memory_fraction is not None:
        keys = {**keys, "mem_fraction_static": "kv_cache.memory_fraction"}
    if deployment.pair is not None and deployment.pair.transfer is not None:
        keys = {**keys, "disaggregation_transfer_backend": "pair.transfer"}
    version = RELEASES.installed()
    known = version if RELEASES.supports(version) else str(RELEASES)
    return ArgumentTable("sglang", f"SGLang {known}", _parser, keys)


@cache
def _parser() -> EngineParser:  # the installed SGLang's own, else the pinned one
    if RELEASES.installed() is None or RELEASES.import_problem():
        return pinned_parser(PINNED)
    return own_parser("SGLang", _installed, PINNED)


def _installed() -> EngineParser:
    parser = EngineParser()
    import_module(RELEASES.module).ServerArgs.add_cli_args(parser)
    return parser
