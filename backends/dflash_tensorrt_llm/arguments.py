"""A plan as arguments of `trtllm-serve` and as its config.yaml. TensorRT-LLM counts drafted tokens, K = B - 1."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from dflash_serve.common.settings import describe
from dflash_serve.errors import UserError

from .engine_arguments import config_fields, merged
from .launch_plan import TensorRTLLMPlan
from .releases import TRTLLM_ATTENTION
from .upstream import LlmArgs, llm_args


def launcher(plan: TensorRTLLMPlan) -> list[str]:
    """Words that start one process a device on several nodes (Slurm with PMIx, upstream's deployment guides)."""
    nodes, count = plan.deployment.parallel.nodes, plan.deployment.hardware.count
    if nodes == 1:
        return []
    tasks = [f"--nodes={nodes}", f"--ntasks={count}", f"--ntasks-per-node={count // nodes}"]
    return ["srun", "--mpi=pmix", *tasks, "trtllm-llmapi-launch"]


def configuration(plan: TensorRTLLMPlan, drafter: Path) -> dict[str, object]:
    """The configuration, as far as it differs from upstream's defaults, with the user's own keys.

    Args:
        drafter: the folder that it loads.

    Raises:
        UserError: the release would refuse it.
    """
    batch, target = plan.max_batch_size, plan.deployment.target
    limit = {} if batch is None else {"max_batch_size": batch}
    fields: dict[str, object] = {
        "tensor_parallel_size": plan.deployment.parallel.tensor,
        **limit,
        "max_seq_len": plan.max_model_len,
        "max_num_tokens": plan.max_num_tokens,
        "kv_cache_config": _kv_cache(plan),
        # Padding lets every batch size use a graph; without it a batch of 17 runs eagerly.
        "cuda_graph_config": {"enable_padding": True, **limit},
        "enable_iter_perf_stats": True,  # acceptance in /metrics
        "return_perf_metrics": True,  # without it there is no /prometheus/metrics
        **_parallel(plan),
        **({} if target.revision is None else {"revision": target.revision}),
        **({} if plan.drafter is None else {"speculative_config": _speculative(plan, drafter)}),
    }
    fields = merged(fields, config_fields(plan.engine_args))
    mirrored = LlmArgs.model_fields.keys() - (
        {"speculative_config"} if plan.drafts_itself else set()
    )  # DFlash alone is
    ours = {name: value for name, value in fields.items() if name in mirrored}
    try:
        known = llm_args(ours, plan.release).yaml_fields()
    except ValidationError as error:
        raise UserError(describe(error), where=f"configuration for TensorRT-LLM {plan.release}") from None
    return {**known, **{name: value for name, value in fields.items() if name not in known}}


def _parallel(plan: TensorRTLLMPlan) -> dict[str, object]:
    """Ways of spreading the target over devices, beyond tensor parallelism."""
    parallel, fields = plan.deployment.parallel, dict[str, object]()
    if parallel.pipeline > 1 or parallel.context > 1:
        fields |= {"pipeline_parallel_size": parallel.pipeline, "context_parallel_size": parallel.context}
    if parallel.expert > 1:
        fields["moe_expert_parallel_size"] = parallel.expert
    if parallel.attention_data:
        fields["enable_attention_dp"] = True
    if parallel.nodes > 1:
        fields["gpus_per_node"] = plan.deployment.hardware.count // parallel.nodes
    return fields


def _kv_cache(plan: TensorRTLLMPlan) -> dict[str, object]:
    """The target's K/V pool; blocks are reused only where no drafter needs the features of every prompt token."""
    kv_cache = plan.deployment.kv_cache
    speculates = plan.drafter is not None or plan.drafts_itself
    fields: dict[str, object] = {
        "enable_block_reuse": not speculates if kv_cache.block_reuse is None else kv_cache.block_reuse
    }
    if kv_cache.dtype in ("fp8", "nvfp4"):  # any other is the target's own type, `auto` to upstream
        fields["dtype"] = kv_cache.dtype
    fraction = kv_cache.memory_fraction
    if fraction is None and plan.drafter is not None and plan.gpu is not None:
        fraction = plan.pool_fraction(plan.gpu)
    return fields if fraction is None else {**fields, "free_gpu_memory_fraction": fraction}


def _speculative(plan: TensorRTLLMPlan, drafter: Path) -> dict[str, object]:
    """DFlash with the drafter in that folder; K = B - 1, for upstream does not count the anchor."""
    config, lengths = plan.drafter, plan.draft_lengths()
    assert config is not None
    return {
        "decoding_type": "DFlash",
        "max_draft_len": max(lengths.values()) if lengths else plan.block_size - 1,
        **({"draft_len_schedule": lengths} if lengths else {}),
        "speculative_model": str(drafter),
        # Upstream finds these itself only in a local folder; said here, nothing depends on it.
        **({} if config.mask_token_id is None else {"mask_token_id": config.mask_token_id}),
        "target_layer_ids": list(config.target_layer_ids),
        # Older releases do not know the key, and have what is its default since.
        **({"attention_backend": plan.attention_backend} if plan.release.has(TRTLLM_ATTENTION) else {}),
        **({"context_recompute_tail": plan.recompute_tail} if plan.deployment.kv_cache.block_reuse else {}),
    }
