"""The config.json of rank checkpoints says what TensorRT-LLM's converter says of the same model; others are refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from dflash_engines.rank_config import rank_config, refuse
from dflash_serve.errors import UserError

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
LLAMA_3_1 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
EXPORTED = {
    "producer": {"name": "modelopt", "version": "0.47.0"}, "architecture": "LlamaForCausalLM", "dtype": "bfloat16",
    "logits_dtype": "float16", "vocab_size": 128, "position_embedding_type": "rope_gpt_neox", "rotary_pct": 1.0,
    "mapping": {"world_size": 2, "tp_size": 2, "pp_size": 1},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}  # fmt: skip
"""What ModelOpt 0.47 writes with transformers 5: no rotary_base, no rotary_scaling."""
SAID_BY_BOTH = {
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64,
    "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 1024, "hidden_act": "silu",
    "position_embedding_type": "rope_gpt_neox", "attn_bias": False, "mlp_bias": False, "residual_mlp": False,
    "disable_weight_only_quant_plugin": False, "remove_duplicated_kv_heads": False, "dtype": "bfloat16",
}  # fmt: skip
"""`LLaMAConfig.from_hugging_face` (@04100fd) of either model below."""


def llama(**fields: Any) -> LlamaConfig:
    rope = {**LLAMA_3_1, "rope_theta": 500000.0}
    return LlamaConfig(
        architectures=["LlamaForCausalLM"], rms_norm_eps=1e-5, **{**SIZES, "rope_parameters": rope, **fields}
    )


def mistral(**fields: Any) -> MistralConfig:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    given = {**SIZES, "head_dim": 16, "sliding_window": None, "rope_parameters": rope, **fields}
    return MistralConfig(architectures=["MistralForCausalLM"], rms_norm_eps=1e-6, **given)


def test_every_field_of_a_llama_3_1_is_upstreams() -> None:
    refuse(llama())
    assert rank_config(EXPORTED, llama()) == {
        **EXPORTED,
        **SAID_BY_BOTH,
        "architecture": "LlamaForCausalLM",
        "head_size": 8,
        "norm_epsilon": 1e-5,
        "rotary_base": 500000.0,
        "rotary_scaling": {**LLAMA_3_1, "type": "llama3"},
        "tie_word_embeddings": False,
    }


def test_every_field_of_a_mistral_is_upstreams() -> None:
    refuse(mistral())
    assert rank_config(EXPORTED, mistral()) == {
        **EXPORTED,
        **SAID_BY_BOTH,
        "architecture": "MistralForCausalLM",
        "head_size": 16,
        "norm_epsilon": 1e-6,
        "rotary_base": 1e6,
        "rotary_scaling": None,
        "tie_word_embeddings": False,
    }


def test_rope_in_the_form_of_transformers_4_is_the_same() -> None:
    old = {**SIZES, "rope_theta": 500000.0, "rope_scaling": dict(LLAMA_3_1), "architectures": ["LlamaForCausalLM"]}
    found = rank_config(EXPORTED, LlamaConfig.from_dict(old))
    assert found["rotary_base"] == 500000.0
    assert found["rotary_scaling"] == {**LLAMA_3_1, "type": "llama3"}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Qwen2Config(**SIZES), "a qwen2 like this: its rank files need q_norm, k_norm or biases"),
        (Qwen3Config(**SIZES), "a qwen3 like this: its rank files need q_norm, k_norm or biases"),
        (llama(attention_bias=True), "its attention has biases"),
        (llama(mlp_bias=True), "its MLP has biases"),
        (mistral(sliding_window=256), "sliding window"),
        (llama(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}), "scaled by 'yarn'"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_what_would_not_build_or_answer_garbage_is_refused_by_name(config: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        refuse(config)
