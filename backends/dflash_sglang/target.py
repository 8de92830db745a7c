"""What a target's config.json tells of its shape on devices. Nothing is loaded or downloaded but that file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_serve.deployment import Model
from dflash_serve.drafter.pairing import TEXT_CONFIGS, TargetShape, read_target_shape
from dflash_serve.drafter.source import local_folder

BITS: Mapping[str, float] = {"none": 16, "fp8": 8, "nvfp4": 4.5, "mxfp4": 4.25}
"""Bits a weight, scales included: NVFP4 has 8 per 16 values, MXFP4 8 per 32."""
EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
CAPTURING = (
    *("beam", "deepseek", "gemma4", "glm4_moe_lite", "glm5", "gpt_oss", "inkling", "kimi", "laguna", "lfm2", "llama"),
    *("mimo", "minicpm", "minimax", "mistral", "muse", "nanbeige", "nemotron", "qwen3"),
)
"""Families (model_type's beginning) whose SGLang model hands out hidden states (`set_dflash_layers_to_capture`)."""


@dataclass(frozen=True)
class Target:
    """A target as SGLang will lay it out."""

    shape: TargetShape
    attention_heads: int
    kv_heads: int
    head_dim: int
    latent: bool
    """DeepSeek's attention: one latent vector a token instead of keys and values a head."""
    experts: int
    native_quantization: str | None
    """Of its own weights: fp8, nvfp4, mxfp4, or the method's name; None = unquantised."""
    head_is_quantized: bool
    weight_bytes: int
    """Of all devices together; an estimate from the sizes (a few per cent)."""

    @property
    def hands_out_features(self) -> bool:
        """Whether SGLang's class for it captures the layers a drafter reads."""
        return self.shape.model_type.startswith(CAPTURING)

    def kv_bytes(self, bytes_each: float) -> int:
        """Keys and values of one token, all layers, all heads."""
        width = 576 if self.latent else 2 * self.kv_heads * self.head_dim
        return int(self.shape.num_layers * width * bytes_each)


def read_target(model: Model) -> Target:
    """Reads the target's config.json.

    Raises:
        UserError: no such target, or a config.json without a language model's sizes.
    """
    folder = local_folder(model.model, model.revision, files=["config.json", "hf_quant_config.json"])
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8")) if _has_config(folder) else {}
    shape = replace(read_target_shape(folder), name=model.model)
    inner = next((raw[key] for key in TEXT_CONFIGS if isinstance(raw.get(key), dict)), raw)
    recipe = _recipe(raw, inner, folder)
    heads = _size(inner, "num_attention_heads", 1)
    native = _native(recipe)
    bits = BITS[model.quantization] if model.quantization != "none" else BITS.get(native or "none", 4.5)
    return Target(
        shape=shape,
        attention_heads=heads,
        kv_heads=_size(inner, "num_key_value_heads", heads),
        head_dim=_size(inner, "head_dim", shape.hidden_size // heads),
        latent=bool(_size(inner, "kv_lora_rank")),
        experts=_experts(inner),
        native_quantization=native,
        head_is_quantized=native == "nvfp4" and not _spares_head(recipe),
        weight_bytes=_weight_bytes(inner, bits),
    )


def _has_config(folder: Path) -> bool:
    return (folder / "config.json").is_file()  # where it is not, read_target_shape says so


def _recipe(raw: Mapping[str, object], inner: Mapping[str, object], folder: Path) -> dict[str, object]:
    """How its weights are quantised: inside config.json, or in ModelOpt's file beside it."""
    for holder in (raw, inner):
        inside = holder.get("quantization_config")
        if isinstance(inside, dict):
            return inside
    beside = folder / "hf_quant_config.json"
    if beside.is_file():
        recipe = json.loads(beside.read_text(encoding="utf-8")).get("quantization", {})
        return recipe if isinstance(recipe, dict) else {}
    return {}


def _native(recipe: Mapping[str, object]) -> str | None:
    words = " ".join(str(recipe.get(key, "")) for key in ("quant_algo", "quant_method", "format")).lower()
    for name, marks in {"nvfp4": ("nvfp4", "fp4_pack"), "mxfp4": ("mxfp4",), "fp8": ("fp8",)}.items():
        if any(mark in words for mark in marks):
            return name
    return words.split()[0] if words.split() else None


def _spares_head(recipe: Mapping[str, object]) -> bool:
    spared = [recipe.get(key) for key in ("exclude_modules", "ignore", "modules_to_not_convert")]
    return any("lm_head" in str(module) for modules in spared if isinstance(modules, list) for module in modules)


def _size(inner: Mapping[str, object], key: str, default: int = 0) -> int:
    value = inner.get(key)
    return value if type(value) is int and value > 0 else default


def _experts(inner: Mapping[str, object]) -> int:
    return next((_size(inner, key) for key in EXPERTS if _size(inner, key)), 0)


def _weight_bytes(inner: Mapping[str, object], bits: float) -> int:
    """Attention, MLPs or experts, and both ends of the vocabulary, which stay in 16 bits."""
    hidden, layers = _size(inner, "hidden_size"), _size(inner, "num_hidden_layers")
    heads = _size(inner, "num_attention_heads", 1)
    dim = _size(inner, "head_dim", hidden // heads)
    attention = layers * hidden * dim * 2 * (heads + _size(inner, "num_key_value_heads", heads))
    wide = _size(inner, "intermediate_size")
    narrow = _size(inner, "moe_intermediate_size", wide)
    per_layer = narrow * (_experts(inner) + _size(inner, "n_shared_experts")) if _experts(inner) else wide
    ends = _size(inner, "vocab_size") * hidden * (1 if inner.get("tie_word_embeddings") else 2)
    return int(((layers * 3 * hidden * per_layer + attention) * bits + ends * 16) / 8)
