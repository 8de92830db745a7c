"""What a target's config.json tells of its shape on devices: heads, experts, bytes. Nothing is loaded or downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_serve.deployment import Quantization
from dflash_serve.drafter.pairing import TEXT_CONFIGS, TargetShape, read_target_shape

BITS: Mapping[Quantization, float] = {"none": 16, "fp8": 8, "nvfp4": 4.5, "mxfp4": 4.25}
"""Bits a weight, scales included: NVFP4 has 8 per 16 values, MXFP4 8 per 32."""
EXPERT_KEYS = ("num_local_experts", "n_routed_experts", "num_experts")


@dataclass(frozen=True)
class Target:
    """A target as TensorRT-LLM will lay it out."""

    shape: TargetShape
    architecture: str
    num_attention_heads: int
    num_key_value_heads: int
    num_experts: int
    """0 = dense."""
    native_quantization: str | None
    """The method that its own config.json names."""
    weight_bytes: int
    """Of all devices together; an estimate from the sizes (a few per cent)."""


def read_target(folder: Path, name: str, quantization: Quantization) -> Target:
    """Reads `folder/config.json`.

    Raises:
        UserError: no config.json, or one without a language model's sizes.
    """
    shape = read_target_shape(folder)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    inner = next((raw[key] for key in TEXT_CONFIGS if isinstance(raw.get(key), dict)), raw)
    native = raw.get("quantization_config") or inner.get("quantization_config") or {}
    heads = int(inner.get("num_attention_heads") or 1)
    architectures = raw.get("architectures") or ["unknown"]
    return Target(
        shape=TargetShape(
            name, shape.model_type, shape.vocab_size, shape.hidden_size, shape.num_layers, shape.max_position_embeddings
        ),
        architecture=str(architectures[0]),
        num_attention_heads=heads,
        num_key_value_heads=int(inner.get("num_key_value_heads") or heads),
        num_experts=_experts(inner),
        native_quantization=native.get("quant_method"),
        weight_bytes=_weight_bytes(inner, quantization, _native_bits(native)),
    )


def _experts(inner: Mapping[str, object]) -> int:
    return next((_size(inner, key) for key in EXPERT_KEYS if inner.get(key)), 0)


def _native_bits(native: Mapping[str, object]) -> float | None:
    """Bits of the weights that the checkpoint itself quantises, by its quant_method."""
    method = native.get("quant_method")
    known = {"mxfp4": 4.25, "fp8": 8.0, "modelopt": 4.5, "compressed-tensors": 4.5, "awq": 4.5, "gptq": 4.5}
    return known.get(str(method)) if method else None


def _size(inner: Mapping[str, object], key: str, default: int = 0) -> int:
    value = inner.get(key)
    return value if type(value) is int else default


def _weight_bytes(inner: Mapping[str, object], quantization: Quantization, native: float | None) -> int:
    """Attention, MLPs or experts, both ends of the vocabulary; native 4-bit checkpoints keep attention in bf16."""
    hidden, layers = _size(inner, "hidden_size"), _size(inner, "num_hidden_layers")
    inside = BITS[quantization] if quantization != "none" else native or 16.0
    outside = inside if quantization in ("fp8", "nvfp4") else 16.0
    attention = layers * _attention(inner, hidden)
    ends = _size(inner, "vocab_size") * hidden * (1 if inner.get("tie_word_embeddings") else 2)
    return int((_feed_forward(inner, hidden, layers) * inside + attention * outside + ends * 16) / 8)


def _attention(inner: Mapping[str, object], hidden: int) -> int:
    """Weights of one layer's attention: grouped queries, or DeepSeek's latent form (Kimi)."""
    heads = _size(inner, "num_attention_heads", 1)
    rank = _size(inner, "kv_lora_rank")
    if rank:
        query, nope = _size(inner, "q_lora_rank"), _size(inner, "qk_nope_head_dim")
        rope, value = _size(inner, "qk_rope_head_dim"), _size(inner, "v_head_dim")
        return (
            hidden * (query + rank + rope) + query * heads * (nope + rope) + rank * heads * (nope + value)
            + heads * value * hidden
        )  # fmt: skip
    dim = _size(inner, "head_dim") or hidden // heads
    return hidden * dim * (2 * heads + 2 * _size(inner, "num_key_value_heads", heads))


def _feed_forward(inner: Mapping[str, object], hidden: int, layers: int) -> int:
    """Weights of all MLPs: three matrices each, per expert where there are experts."""
    wide = _size(inner, "intermediate_size")
    experts = _experts(inner)
    if not experts:
        return layers * 3 * hidden * wide
    narrow = _size(inner, "moe_intermediate_size") or wide
    dense = _size(inner, "first_k_dense_replace")
    shared = _size(inner, "n_shared_experts")
    return 3 * hidden * (dense * wide + (layers - dense) * narrow * (experts + shared))
