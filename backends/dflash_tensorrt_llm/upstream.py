"""A mirror of the part of TensorRT-LLM's configuration that we write; it refuses what upstream's models would.

Names, defaults and rules: `tensorrt_llm/llmapi/llm_args.py` @0004396 (1.3) and the reference pages of 1.3.0rc27 and
1.4.0rc1. Upstream's models forbid unknown keys, and so do these; what a release knows is in `releases`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationInfo, model_validator

from dflash_serve.common.settings import Frozen

from .releases import BUDGET_CHECK, DFLASH, RECOMPUTE_TAIL, TRTLLM_ATTENTION, Release


def why_no_drafter(family: str) -> str | None:
    """Why upstream drafts nothing for targets of this model_type; None = it does, as far as was read."""
    if not family.startswith(WITHOUT_DRAFTER):
        return None
    return f"TensorRT-LLM's model for {family!r} makes no drafter, whatever speculative_config says"


def release_of(info: ValidationInfo) -> Release | None:
    """The release a model is validated for; None = any."""
    return info.context["release"] if info.context else None


WITHOUT_DRAFTER = ("gemma4", "mistral", "qwen2")
"""Families (model_type's beginning) whose model upstream is a `DecoderModelForCausalLM`: drafters and their workers are
made by `SpecDecOneEngineForCausalLM` alone (modeling_gemma4.py @00e7d10, modeling_mistral.py @002f3cc, modeling_qwen.py
@047098b). Others were not read, and are not refused."""
LATER = {
    "attention_backend": TRTLLM_ATTENTION,
    "context_recompute_tail": RECOMPUTE_TAIL,
    "skip_ctx_buffer_budget_check": BUDGET_CHECK,
}
"""Key of `speculative_config` -> what brought it."""


class DFlashDecodingConfig(Frozen):
    """`speculative_config` with decoding_type DFlash. `max_draft_len` is K = B - 1: the anchor does not count."""

    decoding_type: Literal["DFlash"] = "DFlash"
    max_draft_len: PositiveInt
    speculative_model: str
    mask_token_id: NonNegativeInt | None = None
    target_layer_ids: tuple[NonNegativeInt, ...] | None = None
    attention_backend: Literal["VANILLA", "TRTLLM", "FA4"] = "VANILLA"
    max_concurrency: PositiveInt | None = None
    draft_len_schedule: dict[PositiveInt, NonNegativeInt] | None = None
    acceptance_rate_window_size: NonNegativeInt | None = None
    acceptance_rate_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    use_rejection_sampling: bool = False
    enable_penalty: bool = False
    context_recompute_tail: NonNegativeInt | None = None
    """1.4: prompt tokens that a prefix hit recomputes, so that the drafter sees at least those."""
    skip_ctx_buffer_budget_check: bool | None = None

    @model_validator(mode="after")
    def _of_its_release(self, info: ValidationInfo) -> DFlashDecodingConfig:
        release = release_of(info)
        if release is None:
            return self
        if not release.has(DFLASH):
            raise ValueError(f"TensorRT-LLM {release} has no DFlash; it came with {DFLASH.since}")
        if self.attention_backend not in release.attention_backends:
            raise ValueError(f"attention_backend {self.attention_backend} is not in TensorRT-LLM {release}")
        for name, feature in LATER.items():
            if name in self.model_fields_set and not release.has(feature):
                raise ValueError(f"{name} is not in TensorRT-LLM {release}")
        return self

    @model_validator(mode="after")
    def _schedule_is_sound(self) -> DFlashDecodingConfig:
        schedule = self.draft_len_schedule
        if schedule is None:
            return self
        if self.max_concurrency is not None:
            raise ValueError("max_concurrency and draft_len_schedule exclude each other")
        if not schedule:
            raise ValueError("draft_len_schedule is empty")
        if schedule[min(schedule)] != self.max_draft_len:
            raise ValueError(f"draft_len_schedule must begin with max_draft_len {self.max_draft_len}")
        if max(schedule.values()) > self.max_draft_len:
            raise ValueError(f"draft_len_schedule goes beyond max_draft_len {self.max_draft_len}")
        return self


class KvCacheConfig(Frozen):
    """`kv_cache_config`: the target's K/V pool."""

    enable_block_reuse: bool = True
    free_gpu_memory_fraction: Annotated[float, Field(ge=0, le=1)] = 0.9
    dtype: Literal["auto", "fp8", "nvfp4"] = "auto"  # any other dies as the model is loaded
    tokens_per_block: PositiveInt = 32
    max_tokens: PositiveInt | None = None


class CudaGraphConfig(Frozen):
    """`cuda_graph_config`: graphs of decoding batches of these sizes."""

    enable_padding: bool = False
    max_batch_size: NonNegativeInt = 0
    batch_sizes: tuple[PositiveInt, ...] | None = None

    @model_validator(mode="after")
    def _sizes_agree(self) -> CudaGraphConfig:
        if self.batch_sizes and self.max_batch_size and max(self.batch_sizes) != self.max_batch_size:
            raise ValueError(f"max_batch_size {self.max_batch_size} is not the largest of batch_sizes")
        return self


class MoeConfig(Frozen):
    """`moe_config`: which kernels run the experts."""

    backend: Literal["AUTO", "CUTLASS", "CUTEDSL", "TRTLLM", "DEEPGEMM", "VANILLA", "TRITON"] = "AUTO"
    max_num_tokens: PositiveInt | None = None


class LlmArgs(Frozen):
    """The root of `config.yaml` (upstream: TorchLlmArgs without `model`, which is on the command line)."""

    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    context_parallel_size: PositiveInt = 1
    moe_expert_parallel_size: PositiveInt | None = None
    gpus_per_node: PositiveInt | None = None
    enable_attention_dp: bool = False
    revision: str | None = None
    dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    max_batch_size: PositiveInt = 2048
    max_num_tokens: PositiveInt = 8192
    max_seq_len: PositiveInt | None = None
    max_beam_width: PositiveInt = 1
    trust_remote_code: bool = False
    stream_interval: PositiveInt = 1
    num_postprocess_workers: NonNegativeInt = 0
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    enable_chunked_prefill: bool = False
    disable_overlap_scheduler: bool = False
    enable_iter_perf_stats: bool = False
    return_perf_metrics: bool = False
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    cuda_graph_config: CudaGraphConfig | None = CudaGraphConfig()
    moe_config: MoeConfig = MoeConfig()
    speculative_config: DFlashDecodingConfig | None = None

    @model_validator(mode="after")
    def _speculates_soundly(self, info: ValidationInfo) -> LlmArgs:
        speculative = self.speculative_config
        if speculative is None:
            return self
        if self.pipeline_parallel_size > 1:
            raise ValueError("DFlash does not run with pipeline parallelism")
        if self.context_parallel_size > 1:
            raise ValueError("DFlash does not run with context parallelism")
        if self.max_beam_width > 1:
            raise ValueError("DFlash does not run with beam search")
        if speculative.use_rejection_sampling and self.guided_decoding_backend is not None:
            raise ValueError("use_rejection_sampling and guided decoding exclude each other")
        rows = self.max_batch_size * (speculative.max_draft_len + 1)
        release = release_of(info)
        if rows > self.max_num_tokens and (release is None or release.has(BUDGET_CHECK)):
            raise ValueError(f"max_batch_size * (max_draft_len + 1) = {rows} exceeds max_num_tokens")
        return self

    def yaml_fields(self) -> dict[str, object]:
        """The keys of config.yaml that we decided; upstream's defaults are left out."""
        return self.model_dump(exclude_unset=True)


def llm_args(fields: dict[str, object], release: Release) -> LlmArgs:
    """The configuration as `release` would read it.

    Raises:
        pydantic.ValidationError: what that release refuses.
    """
    return LlmArgs.model_validate(fields, context={"release": release})
