"""A Deployment as arguments of `vllm serve`. vLLM counts drafted tokens, K = B - 1, where we count slots."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from dflash_serve.server_adapter import DRAFT, LOGGING, SECRETS

from .engine_arguments import PARSER_FLAGS, PARSERS, argument_table
from .heads import method_of
from .launch_plan import VLLMPlan
from .schedule import every_width

SCHEDULER = "--scheduler-cls"
SCHEDULERS = "dflash_vllm.plugin.scheduler"
"""The module of our schedulers, whose widths follow the load."""
Flag = tuple[str, ...]
"""`--name` and its value, or `--name` alone."""


def arguments(plan: VLLMPlan, folder: Path) -> list[str]:
    """The command line without host and port, the target first; the user's own arguments come last."""
    parts = (
        _models(plan),
        _serving(plan, folder),
        _precision(plan),
        _parallel(plan),
        _limits(plan),
        _speculation(plan, folder),
    )
    ours = [word for part in parts for flag in part for word in flag]
    return [plan.deployment.target.model, *ours, *argument_table(plan).words(plan.engine_args)]


def _models(plan: VLLMPlan) -> Iterator[Flag]:
    if plan.deployment.target.revision is not None:
        yield "--revision", plan.deployment.target.revision
    # Otherwise generation_config.json sets sampling parameters that no request asked for.
    yield "--generation-config", "vllm"


def _serving(plan: VLLMPlan, folder: Path) -> Iterator[Flag]:
    # Keys go into a file: every user of the machine can read a command line.
    serving = plan.deployment.serving
    if serving.served_model_name is not None:
        yield "--served-model-name", serving.served_model_name
    for key, _, name in PARSERS.of(serving):
        if key == "tool_call_parser":
            yield ("--enable-auto-tool-choice",)
        yield f"--{PARSER_FLAGS[key]}", name
    if serving.api_key_file is not None:
        yield "--config", str(folder / SECRETS)
    if serving.otlp_traces_endpoint is not None:
        yield "--otlp-traces-endpoint", serving.otlp_traces_endpoint
    if serving.log_format == "json":
        yield "--log-config-file", str(folder / LOGGING)  # uvicorn's; vLLM's own is a variable


def _precision(plan: VLLMPlan) -> Iterator[Flag]:
    yield "--dtype", plan.dtype
    asked = plan.deployment.target.quantization
    if asked != "none" and plan.target.native_quantization is None:
        yield "--quantization", asked  # a quantised checkpoint says so itself
    if plan.on_cpu and "enforce-eager" not in plan.given:
        yield ("--enforce-eager",)  # compiling for a CPU takes minutes at every start
    if plan.deployment.kv_cache.dtype != "auto":
        yield "--kv-cache-dtype", plan.deployment.kv_cache.dtype


def _parallel(plan: VLLMPlan) -> Iterator[Flag]:
    yield "--tensor-parallel-size", str(plan.deployment.parallel.tensor)
    if plan.deployment.parallel.pipeline > 1:
        yield "--pipeline-parallel-size", str(plan.deployment.parallel.pipeline)
    if plan.deployment.parallel.expert > 1:
        yield ("--enable-expert-parallel",)


def _limits(plan: VLLMPlan) -> Iterator[Flag]:
    limits, cache = plan.deployment.limits, plan.deployment.kv_cache
    if limits.max_batch_size is not None or plan.block_size is not None:
        yield "--max-num-seqs", str(plan.max_batch_size)
    yield "--max-num-queued-reqs", str(limits.max_queued_requests)
    if limits.max_model_len is not None:
        yield "--max-model-len", str(limits.max_model_len)
    if plan.block_size is not None:
        # Every request's block takes K slots more of the same buffer when it is drafted.
        yield "--max-num-batched-tokens", str(plan.rows + plan.max_batch_size * (plan.block_size - 1))
        yield "--max-num-scheduled-tokens", str(plan.rows)
    elif limits.max_num_tokens is not None:
        yield "--max-num-batched-tokens", str(limits.max_num_tokens)
    if cache.block_reuse is False:
        yield ("--no-enable-prefix-caching",)
    if cache.memory_fraction is not None and plan.memory is not None:
        yield "--gpu-memory-utilization", str(plan.memory.fraction(cache.memory_fraction))


def _speculation(plan: VLLMPlan, folder: Path) -> Iterator[Flag]:
    if plan.block_size is None:
        return
    yield "--speculative-config", json.dumps(speculative_config(plan, folder / DRAFT))
    if plan.has_our_scheduler:
        scheduler = "WidthScheduler" if plan.on_cpu else "AsyncWidthScheduler"
        yield SCHEDULER, f"{SCHEDULERS}.{scheduler}"


def speculative_config(plan: VLLMPlan, draft: Path) -> dict[str, object]:
    """vLLM's `SpeculativeConfig` (config/speculative.py): greedy drafts, and the acceptance test that is exact."""
    assert plan.block_size is not None
    assert plan.drafter is not None
    method = method_of(plan.drafter)
    config: dict[str, object] = {
        "method": method,
        "model": str(draft),
        "num_speculative_tokens": plan.block_size - 1,
        "draft_tensor_parallel_size": plan.deployment.parallel.tensor,
        "draft_sample_method": "greedy",
        "rejection_sample_method": "standard",
    }
    if method == "dflash":
        # K/V of a context token are of that token alone, where EAGLE's are of the next one, too: vLLM would leave the
        # last block that it has of a prompt unused. DSpark's was not tried.
        config["disable_eagle_block_drop"] = True
    if plan.widths != (plan.block_size,):
        schedule = plan.schedule() or every_width(plan.widths, plan.max_batch_size)
        config["num_speculative_tokens_per_batch_size"] = schedule
    if not plan.on_cpu:
        # Otherwise a drafter takes over the target's: FP8 keys and values, and kernels made for causal attention.
        config["kv_cache_dtype"] = "bfloat16"
    kernels = drafter_attention(plan)
    return config if kernels is None else {**config, "attention_backend": kernels}


def drafter_attention(plan: VLLMPlan) -> str | None:
    """Kernels that take blocks which are not causal; None where the drafter may have the target's."""
    if plan.on_cpu or plan.drafter is None or all(kind.causal for kind in plan.drafter.layers):
        return None
    return "FLASH_ATTN"
