"""Rank files go back together to the model they were cut from, and their config.json is TensorRT-LLM's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from dflash_engines.cli import find_sources
from dflash_engines.recipe import BuildRecipe
from dflash_engines.trtllm_checkpoint import build_command, rank_config, reassemble, refuse
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError

HEADS, KV, DIM, HIDDEN, INNER, VOCAB = 8, 2, 4, 16, 32, 64


def whole_model() -> dict[str, Tensor]:
    """One Llama layer under Hugging Face's names."""
    room = "model.layers.0"
    shapes = {
        "model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "model.norm": (HIDDEN,),
        f"{room}.input_layernorm": (HIDDEN,), f"{room}.post_attention_layernorm": (HIDDEN,),
        f"{room}.self_attn.q_proj": (HEADS * DIM, HIDDEN), f"{room}.self_attn.k_proj": (KV * DIM, HIDDEN),
        f"{room}.self_attn.v_proj": (KV * DIM, HIDDEN), f"{room}.self_attn.o_proj": (HIDDEN, HEADS * DIM),
        f"{room}.mlp.gate_proj": (INNER, HIDDEN), f"{room}.mlp.up_proj": (INNER, HIDDEN),
        f"{room}.mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    return {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_ranks(folder: Path, model: dict[str, Tensor], size: int, scale: float) -> None:
    """As TensorRT-LLM splits it: columns of q, k, v, gate and up, rows of the others; K/V heads repeat if need be."""
    config = {
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_size": DIM, "vocab_size": VOCAB,
        "num_hidden_layers": 1, "mapping": {"tp_size": size},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    ours, theirs = "model.layers.0", "transformer.layers.0"
    for rank in range(size):

        def part(name: str, axis: int, rank: int = rank) -> Tensor:
            tensor = model[f"{name}.weight"]
            if name.endswith(("k_proj", "v_proj")) and size > KV:
                tensor = tensor.view(KV, DIM, HIDDEN).repeat_interleave(size // KV, 0).view(-1, HIDDEN)
            return tensor.chunk(size, dim=axis)[rank].contiguous()

        tensors = {
            "transformer.vocab_embedding.weight": part("model.embed_tokens", 0),
            "lm_head.weight": part("lm_head", 0),
            "transformer.ln_f.weight": model["model.norm.weight"],
            f"{theirs}.input_layernorm.weight": model[f"{ours}.input_layernorm.weight"],
            f"{theirs}.post_layernorm.weight": model[f"{ours}.post_attention_layernorm.weight"],
            f"{theirs}.attention.qkv.weight": torch.cat([part(f"{ours}.self_attn.{n}_proj", 0) for n in "qkv"]) / scale,
            f"{theirs}.attention.qkv.weights_scaling_factor": torch.tensor([scale]),
            f"{theirs}.attention.dense.weight": part(f"{ours}.self_attn.o_proj", 1),
            f"{theirs}.mlp.fc.weight": part(f"{ours}.mlp.gate_proj", 0),
            f"{theirs}.mlp.gate.weight": part(f"{ours}.mlp.up_proj", 0),
            f"{theirs}.mlp.proj.weight": part(f"{ours}.mlp.down_proj", 1),
        }
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / f"rank{rank}.safetensors")


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_go_back_together(size: int, tmp_path: Path) -> None:
    model = whole_model()
    write_ranks(tmp_path, model, size, scale=0.5)
    found = reassemble(tmp_path)
    assert found.keys() == model.keys()
    for name, tensor in model.items():
        torch.testing.assert_close(found[name], tensor)


def test_the_command_builds_one_engine_a_rank() -> None:
    deployment = Deployment.model_validate(
        {"target": {"model": "t"}, "limits": {"max_batch_size": 4, "max_model_len": 512}}
    )
    argv = build_command(Path("/x/tp4"), deployment, 4, "fp8")
    assert argv == [
        "trtllm-build", "--checkpoint_dir", "tp4", "--output_dir", "tp4-engine", "--max_batch_size", "4",
        "--max_seq_len", "512", "--max_num_tokens", "8192", "--gemm_plugin", "auto", "--workers", "4",
        "--use_fp8_context_fmha", "enable",
    ]  # fmt: skip


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


UPSTREAMS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "head_size": 8, "norm_epsilon": 1e-5, "rotary_base": 500000.0,
        "rotary_scaling": {**LLAMA_3_1, "type": "llama3"},
    },
    "MistralForCausalLM": {"head_size": 16, "norm_epsilon": 1e-6, "rotary_base": 1e6, "rotary_scaling": None},
}  # fmt: skip


@pytest.mark.parametrize("config", [llama(), mistral()], ids=lambda config: config.model_type)
def test_every_field_of_a_config_is_upstreams(config: Any) -> None:
    refuse(config)
    (architecture,) = config.architectures
    named = {"architecture": architecture, "tie_word_embeddings": False}
    assert rank_config(EXPORTED, config) == {**EXPORTED, **SAID_BY_BOTH, **named, **UPSTREAMS[architecture]}


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
def test_a_target_whose_engine_would_not_build_or_answer_garbage_is_refused_before_any_step(
    config: Any, said: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    fields = {"deployment": {"target": {"model": str(tmp_path)}, "drafter": {"model": "smollm2"}}}
    with pytest.raises(UserError, match=said):
        find_sources(BuildRecipe.model_validate({**fields, "build": {"checkpoints": {}}}))
