"""The mirror of TensorRT-LLM's configuration refuses what upstream's would refuse, release by release."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dflash_tensorrt_llm.releases import DFLASH, Release
from dflash_tensorrt_llm.upstream import DFlashDecodingConfig, LlmArgs, llm_args


def fields(speculative: dict[str, Any] | None = None, **root: Any) -> dict[str, Any]:
    return {**root, "speculative_config": {"max_draft_len": 7, "speculative_model": "/draft", **(speculative or {})}}


REFUSED = {
    "an unknown key": (fields({"block_size": 8}), "1.4", "Extra inputs"),
    "an unknown key at the root": (fields(draft_model="/draft"), "1.4", "Extra inputs"),
    "no drafted token": (fields({"max_draft_len": 0}), "1.4", "greater than 0"),
    "another algorithm": (fields({"decoding_type": "Eagle3"}), "1.4", "DFlash"),
    "FA4 before PR 18553": (fields({"attention_backend": "FA4"}), "1.3.0rc26", "FA4 is not in TensorRT-LLM 1.3"),
    "an attention backend of its own": (fields({"attention_backend": "FLASHINFER"}), "1.4", "VANILLA"),
    "a 1.4 key in 1.3": (fields({"context_recompute_tail": 64}), "1.3.0rc27", "context_recompute_tail is not in"),
    "TRTLLM before PR 16914": (fields({"attention_backend": "TRTLLM"}), "1.3.0rc24", "TRTLLM is not in TensorRT-LLM"),
    "the very key before PR 16914": (fields({"attention_backend": "VANILLA"}), "1.3.0rc22", "attention_backend is not"),
    "K/V in bfloat16 by name": (fields(kv_cache_config={"dtype": "bfloat16"}), "1.4", "'auto', 'fp8' or 'nvfp4'"),
    "DFlash in 1.2": (fields(), "1.2.1", "1.2 has no DFlash"),
    "schedule and concurrency": (
        fields({"max_concurrency": 8, "draft_len_schedule": {8: 7}}), "1.4", "exclude each other",
    ),
    "a schedule that begins narrow": (fields({"draft_len_schedule": {4: 3, 8: 7}}), "1.4", "must begin with"),
    "a schedule that grows": (fields({"max_draft_len": 3, "draft_len_schedule": {4: 3, 8: 7}}), "1.4", "goes beyond"),
    "an impossible acceptance threshold": (fields({"acceptance_rate_threshold": 1.5}), "1.4", "less than or equal"),
    "graph sizes that disagree": (
        fields(cuda_graph_config={"max_batch_size": 64, "batch_sizes": [1, 8]}), "1.4", "largest of batch_sizes",
    ),
    "more than all of the memory": (
        fields(kv_cache_config={"free_gpu_memory_fraction": 1.2}), "1.4", "less than or equal",
    ),
    "an unknown K/V type": (fields(kv_cache_config={"dtype": "int8"}), "1.4", "auto"),
    "pipeline parallelism": (fields(pipeline_parallel_size=2), "1.4", "pipeline parallelism"),
    "context parallelism": (fields(context_parallel_size=2), "1.4", "context parallelism"),
    "beam search": (fields(max_beam_width=4), "1.4", "beam search"),
    "rejection sampling under a grammar": (
        fields({"use_rejection_sampling": True}, guided_decoding_backend="xgrammar"), "1.4", "exclude each other",
    ),
    "more rows than a step, in 1.4": (fields(max_batch_size=32, max_num_tokens=100), "1.4", "= 256 exceeds"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str) -> None:
    given, release, reason = REFUSED[name]
    with pytest.raises(ValidationError, match=reason):
        llm_args(given, Release.parse(release))


def test_1_3_does_not_count_rows_yet() -> None:
    assert llm_args(fields(max_batch_size=32, max_num_tokens=100), Release.parse("1.3.0rc27")).max_num_tokens == 100


def test_yaml_says_only_what_was_decided() -> None:
    args = llm_args(fields(tensor_parallel_size=8, max_batch_size=4), Release.parse("1.4"))
    assert args.yaml_fields() == {
        "tensor_parallel_size": 8,
        "max_batch_size": 4,
        "speculative_config": {"max_draft_len": 7, "speculative_model": "/draft"},
    }


def test_a_release_is_read_from_its_version() -> None:
    assert Release.parse("1.3.0rc27") < Release.parse("1.3.0") < Release.parse("1.4.0rc1") < Release.parse("1.4")
    assert [Release.parse(v).has(DFLASH) for v in ("1.2.1", "1.3.0rc13", "1.3.0rc14", "1.4.0rc1.post1")] == [
        False, False, True, True,
    ]  # fmt: skip
    assert str(Release.parse("1.4.0rc1")) == "1.4.0rc1"


def test_the_mirror_has_upstreams_fields() -> None:
    """The reference page of 1.4.0rc1, without what we never write (MTP-like and internal fields)."""
    documented = {
        "max_draft_len", "max_total_draft_tokens", "speculative_model", "moe_backend", "max_concurrency",
        "draft_len_schedule", "load_format", "acceptance_rate_window_size", "acceptance_rate_threshold",
        "use_rejection_sampling", "allow_advanced_sampling", "advanced_sampling_mode", "enable_penalty",
        "spec_dec_variant", "mask_token_id", "target_layer_ids", "context_recompute_tail", "decoding_type",
        "attention_backend", "skip_ctx_buffer_budget_check",
    }  # fmt: skip
    assert DFlashDecodingConfig.model_fields.keys() <= documented
    assert LlmArgs.model_fields["max_num_tokens"].default == 8192
