"""Which tensors a drafter has: names, shapes and bytes, and what they are called in the checkpoints that were met."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from dflash_serve.checkpoint.config import DrafterConfig

if TYPE_CHECKING:
    from dflash_serve.checkpoint.formats import Format

ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
"""Names that SGLang's and vLLM's mappers know as well."""
BF16 = 2
"""Bytes of a number in bfloat16."""
RECOMPUTED = "rotary_emb."
"""Rotary buffers of old checkpoints."""
FLOATS: Collection[str] = {"F64", "F32", "F16", "BF16"}
"""safetensors' dtypes of plain weights."""
SCALES = ("weight_scale", "weight_scale_2", "input_scale")
"""What ModelOpt puts beside a quantised weight."""
BLOCK = 16
"""Values along the input that share an NVFP4 scale."""
VOCABULARY_MAPS = ("d2t", "t2d", "draft_id_to_target_id")
PACKED = (
    "_packed",
    "_scale",
    "_scale_2",
    "_scale_inv",
    "_zero_point",
    "weight_shape",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
)
"""Endings of the tensors that quantisers (compressed-tensors, ModelOpt, GPTQ, AWQ) put beside or instead of weights."""


@dataclass(frozen=True)
class Part:
    """One of our tensors inside a checkpoint's: rows [start, start + length) of a fused one, or all of it."""

    name: str
    start: int | None = None


def expected_tensors(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor, in z-lab's names: 11 L + 3, more with biases or a mask embedding."""
    hidden, head = config.hidden_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.feature_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if config.has_mask_embedding:
        shapes["mask_embedding"] = (hidden,)
    for index in range(config.num_layers):
        layer = f"layers.{index}."
        for name, out in _projections(config).items():
            shapes[f"{layer}self_attn.{name}.weight"] = (out, hidden)
            if config.attention_bias:
                shapes[f"{layer}self_attn.{name}.bias"] = (out,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (hidden, config.num_attention_heads * head)
        if config.attention_bias:
            shapes[f"{layer}self_attn.o_proj.bias"] = (hidden,)
        for name in ("q_norm", "k_norm"):
            shapes[f"{layer}self_attn.{name}.weight"] = (head,)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{layer}mlp.{name}.weight"] = (config.intermediate_size, hidden)
        shapes[f"{layer}mlp.down_proj.weight"] = (hidden, config.intermediate_size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{name}.weight"] = (hidden,)
    return shapes


def stored_tensors(
    config: DrafterConfig, format: Format | None, quantised: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor as a checkpoint stores it: quantised modules with their scales.

    FP8: weight [out, in], one scale. NVFP4: weight [out, in / 2], a scale for 16 values [out, in / 16], and one more.
    Both may have an input_scale, of the activations. (ModelOpt 0.47.)
    """
    shapes = expected_tensors(config)
    for module in quantised:
        if format is None or f"{module}.weight" not in shapes:
            continue
        rows, *columns = shapes[f"{module}.weight"]
        scales: dict[str, tuple[int, ...]] = {"weight_scale": (), "input_scale": ()}
        if format == "nvfp4" and columns:
            shapes[f"{module}.weight"] = (rows, columns[0] // 2)
            scales |= {"weight_scale": (rows, columns[0] // BLOCK), "weight_scale_2": ()}
        shapes |= {f"{module}.{name}": shape for name, shape in scales.items()}
    return shapes


def _projections(config: DrafterConfig) -> dict[str, int]:
    """Rows of q, k and v: their order in a fused qkv_proj."""
    kv = config.num_key_value_heads * config.head_dim
    return {"q_proj": config.num_attention_heads * config.head_dim, "k_proj": kv, "v_proj": kv}


def proper_name(name: str) -> str:
    """A checkpoint's tensor name without optional prefix and aliases."""
    name = name.removeprefix("model.")
    return ALIASES.get(name, name)


def parts_of(name: str, config: DrafterConfig) -> list[Part]:
    """What a checkpoint's tensor holds of ours: itself by its proper name, or the pieces of a fused one."""
    name = proper_name(name)
    gate_up = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
    for fused, pieces in (("qkv_proj", _projections(config)), ("gate_up_proj", gate_up)):
        if f".{fused}." in name:
            parts, start = [], 0
            for piece, rows in pieces.items():
                parts.append(Part(name.replace(f".{fused}.", f".{piece}."), start))
                start += rows
            return parts
    return [Part(name)]


def is_packed(name: str, dtype: str) -> bool:
    """Whether a tensor belongs to a quantised checkpoint, by its name or by its safetensors dtype."""
    return name.endswith(PACKED) or dtype not in FLOATS


def weight_bytes(config: DrafterConfig) -> int:
    """Bytes of all tensors of a drafter in bfloat16."""
    return BF16 * sum(prod(shape) for shape in expected_tensors(config).values())


def context_bytes(config: DrafterConfig, kv_heads: int | None = None) -> int:
    """Bytes of one context token's K and V in all layers, in bfloat16; `kv_heads`: of one device, None = all."""
    heads = config.num_key_value_heads if kv_heads is None else kv_heads
    return 2 * config.num_layers * heads * config.head_dim * BF16
