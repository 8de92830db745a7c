"""A Plan to TensorRT-LLM's config.yaml."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from dflash_serve.deployment import describe
from dflash_serve.errors import UserError

from .llm_args import LlmArgs, llm_args
from .memory import pool_fraction
from .plan import Plan


def configuration(plan: Plan, drafter: Path) -> LlmArgs:
    """The configuration, as far as it differs from upstream's defaults; `drafter` is the folder it loads.

    Raises:
        UserError: the release would refuse it.
    """
    parallel, limits = plan.deployment.parallel, plan.deployment.limits
    fields: dict[str, object] = {
        "tensor_parallel_size": parallel.tensor,
        "max_batch_size": limits.max_batch_size,
        "max_seq_len": plan.max_model_len,
        "max_num_tokens": plan.max_num_tokens,
        "kv_cache_config": _kv_cache(plan),
        # Padding lets every batch size use a graph; without it a batch of 17 runs eagerly.
        "cuda_graph_config": {"enable_padding": True, "max_batch_size": limits.max_batch_size},
        "enable_iter_perf_stats": True,  # acceptance in /metrics
        "return_perf_metrics": True,  # without it there is no /prometheus/metrics
    }
    if parallel.pipeline > 1 or parallel.context > 1:
        fields |= {"pipeline_parallel_size": parallel.pipeline, "context_parallel_size": parallel.context}
    if parallel.expert > 1:
        fields["moe_expert_parallel_size"] = parallel.expert
    if parallel.attention_data:
        fields["enable_attention_dp"] = True
    if parallel.nodes > 1:
        fields["gpus_per_node"] = plan.deployment.hardware.count // parallel.nodes
    if plan.deployment.target.revision is not None:
        fields["revision"] = plan.deployment.target.revision
    if plan.drafter is not None:
        fields["speculative_config"] = _speculative(plan, drafter)
    try:
        return llm_args(fields, plan.release)
    except ValidationError as error:
        raise UserError(describe(error), where=f"configuration for TensorRT-LLM {plan.release}") from None


def _kv_cache(plan: Plan) -> dict[str, object]:
    kv_cache = plan.deployment.kv_cache
    speculates = plan.drafter is not None
    fields: dict[str, object] = {
        "enable_block_reuse": not speculates if kv_cache.block_reuse is None else kv_cache.block_reuse
    }
    if kv_cache.dtype != "auto":
        fields["dtype"] = kv_cache.dtype
    fraction = kv_cache.memory_fraction
    if fraction is None and speculates and plan.gpu is not None:
        arena = plan.arena.bytes(plan.deployment.limits.max_batch_size, plan.max_model_len)
        fraction = pool_fraction(plan.gpu, plan.weight_bytes, arena)
    return fields if fraction is None else {**fields, "free_gpu_memory_fraction": fraction}


def _speculative(plan: Plan, drafter: Path) -> dict[str, object]:
    config = plan.drafter
    assert config is not None
    return {
        "decoding_type": "DFlash",
        "max_draft_len": plan.block_size - 1,
        "speculative_model": str(drafter),
        # Upstream finds these itself only in a local folder; said here, nothing depends on it.
        **({} if config.mask_token_id is None else {"mask_token_id": config.mask_token_id}),
        "target_layer_ids": list(config.target_layer_ids),
        "attention_backend": plan.attention_backend,
    }
