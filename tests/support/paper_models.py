"""Targets and drafters on paper: config.json and safetensors headers of the right shapes; nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tests.support.tiny import tiny_drafter_config, write_tiny_drafter

HEADS, KV_HEADS, LAYERS, HIDDEN, VOCAB = 16, 8, 8, 64, 96
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "group_size": 16}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
PAPER_DRAFTER: Mapping[str, object] = {
    "block_size": 8,
    "num_target_layers": LAYERS,
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
}


def write_paper_target(
    folder: Path, *, experts: int = 0, recipe: Mapping[str, object] | None = None, **overrides: object
) -> Path:
    """A Qwen3 target's config.json, dense or with experts, quantised or not."""
    family = "qwen3_moe" if experts else "qwen3"
    fields: dict[str, object] = {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"],
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if experts:
        fields |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if recipe is not None:
        fields["quantization_config"] = dict(recipe)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**fields, **overrides}))
    return folder


def write_paper_drafter(folder: Path, **overrides: object) -> Path:
    """A small drafter that fits it: B = 8."""
    return write_tiny_drafter(folder, tiny_drafter_config(**{**PAPER_DRAFTER, **overrides}))
