"""Tiny quantised drafters in the layouts that people publish: the tensors and recipes of their quantisers.

compressed-tensors 0.19 (llm-compressor), ModelOpt 0.47 and Hugging Face's `fp8`, written from their documentation; a
layout's `plain` weights are the numbers that its tensors stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import linear

from dflash_serve.checkpoint.config import SLIDING, AttentionKind, DrafterConfig
from dflash_serve.checkpoint.formats import GROUP, pack_fp4, quantize, unpack_fp4
from dflash_serve.checkpoint.storage import Format
from dflash_serve.checkpoint.storage import Layout as Dialect
from dflash_serve.checkpoint.tensors import FUSED
from dflash_serve.checkpoint.writer import write_drafter
from tests.support.tiny import edit_json, random_tensors, tiny_drafter_config
from tests.support.tiny_target import SPECIALS

FP8, BLOCK = torch.float8_e4m3fn, 128
FP8_MAX = 448.0
SMALL_GROUP = 32  # values that share a scale of INT4


class Stored(NamedTuple):
    """A weight [out, in] as a layout stores it, and the numbers that this stands for."""

    tensors: Mapping[str, Tensor]  # by the last part of their names
    plain: Tensor


def int8(weight: Tensor, largest: int = 127) -> Stored:
    """W8A8: a scale for every row, whole numbers up to `largest`."""
    scale = weight.abs().amax(dim=1, keepdim=True) / largest
    values = (weight / scale).round().clamp(-largest - 1, largest)
    return Stored({"weight": values.to(torch.int8), "weight_scale": scale}, values * scale)


def packed(weight: Tensor, bits: int, group: int | None) -> Stored:
    """W4A16 and W8A16, symmetric: offset binary, 32 / bits values to an int32, the first in the lowest bits."""
    rows, columns = weight.shape
    grouped = weight.view(rows, -1, group or columns)
    scale = grouped.abs().amax(dim=2, keepdim=True) / (2 ** (bits - 1) - 1)
    values = (grouped / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    each = 32 // bits
    offset = (values.view(rows, -1, each) + 2 ** (bits - 1)).to(torch.int64)
    words = (offset << (torch.arange(each) * bits)).sum(dim=2)
    signed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    stored = {"weight_packed": signed, "weight_scale": scale[..., 0], "weight_shape": torch.tensor([rows, columns])}
    return Stored(stored, (values * scale).view(rows, columns))


def w4a16(weight: Tensor) -> Stored:
    return packed(weight, 4, SMALL_GROUP)


def w8a16(weight: Tensor) -> Stored:
    return packed(weight, 8, None)


def fp8_rows(weight: Tensor) -> Stored:
    """A scale for every row."""
    scale = weight.abs().amax(dim=1, keepdim=True) / FP8_MAX
    values = (weight / scale).to(FP8)
    return Stored({"weight": values, "weight_scale": scale}, values.float() * scale)


def fp8_tensor(weight: Tensor) -> Stored:
    """One scale; ModelOpt's and Hugging Face's names of it are the same."""
    scale = weight.abs().max() / FP8_MAX
    values = (weight / scale).to(FP8)
    return Stored({"weight": values, "weight_scale": scale}, values.float() * scale)


def fp8_static(weight: Tensor) -> Stored:
    """The activations have one scale, too."""
    tensors, plain = fp8_tensor(weight)
    return Stored({**tensors, "input_scale": torch.tensor(0.02)}, plain)


def fp8_blocks(weight: Tensor, name: str = "weight_scale_inv") -> Stored:
    """A scale for every 128 x 128 values, or what is left of them at the edges."""
    rows, columns = weight.shape
    scale = torch.stack(
        [torch.stack([part.abs().max() for part in band.split(BLOCK, 1)]) for band in weight.split(BLOCK, 0)]
    )
    scale = scale / FP8_MAX
    spread = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    values = (weight / spread).to(FP8)
    return Stored({"weight": values, name: scale}, values.float() * spread)


def fp8_blocks_packed(weight: Tensor) -> Stored:
    return fp8_blocks(weight, "weight_scale")


def nvfp4(weight: Tensor) -> Stored:
    """ModelOpt's names."""
    found = quantize(weight, "nvfp4", torch.tensor(0.001))
    return Stored({key.removeprefix("."): tensor for key, tensor in found.state("").items()}, found.dequantize())


def nvfp4_packed(weight: Tensor) -> Stored:
    """compressed-tensors': its scale of the tensor is what values are multiplied with before they are rounded."""
    found = quantize(weight, "nvfp4")
    assert found.scale_2 is not None
    stored = {"weight_packed": found.values, "weight_scale": found.scale}
    return Stored({**stored, "weight_global_scale": (1 / found.scale_2).reshape(1)}, found.dequantize())


def nvfp4_both(weight: Tensor) -> Stored:
    tensors, plain = nvfp4_packed(weight)
    return Stored({**tensors, "input_global_scale": torch.tensor([1000.0])}, plain)


def mxfp4(weight: Tensor) -> Stored:
    """32 values share a power of two."""
    rows, columns = weight.shape
    grouped = weight.view(rows, -1, 32)
    exponent = (grouped.abs().amax(dim=2, keepdim=True) / 6).log2().ceil().clamp(-127, 127)
    codes = pack_fp4((grouped / 2**exponent).view(rows, columns))
    stored = {"weight_packed": codes, "weight_scale": (exponent[..., 0] + 127).to(torch.uint8)}
    return Stored(stored, (unpack_fp4(codes).view(grouped.shape) * 2**exponent).view(rows, columns))


INT8_ROW = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
FP8_OF = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
FP4_OF = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": GROUP}
BY_TOKEN = {"symmetric": True, "dynamic": True, "strategy": "token", "num_bits": 8}


def _compressed(format: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["fc"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def nvfp4_weights(weight: Tensor) -> Stored:
    """ModelOpt's names, without a scale of the activations."""
    tensors, plain = nvfp4(weight)
    return Stored({name: one for name, one in tensors.items() if name != "input_scale"}, plain)


def _modelopt(algorithm: str, group: int | None = None) -> dict[str, Any]:
    sized = {} if group is None else {"group_size": group}
    return {"quant_method": "modelopt", "quant_algo": algorithm, **sized, "ignore": ["fc"]}


def _fp8(**more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["fc"], **more}


@dataclass(frozen=True)
class Layout:
    """A format in a dialect."""

    format: Format
    dialect: Dialect
    recipe: Mapping[str, Any]  # `quantization_config` of config.json
    store: Callable[[Tensor], Stored]


LAYOUTS: Mapping[str, Layout] = {
    "int8": Layout(
        "int8", "compressed-tensors", _compressed("int-quantized", INT8_ROW, {**BY_TOKEN, "type": "int"}), int8
    ),
    "w4a16": Layout(
        "w4a16",
        "compressed-tensors",
        _compressed("pack-quantized", {**INT8_ROW, "num_bits": 4, "strategy": "group", "group_size": SMALL_GROUP}),
        w4a16,
    ),
    "w8a16": Layout("w8a16", "compressed-tensors", _compressed("pack-quantized", INT8_ROW), w8a16),
    "fp8 rows": Layout(
        "fp8",
        "compressed-tensors",
        _compressed("float-quantized", {**FP8_OF, "strategy": "channel"}, {**BY_TOKEN, "type": "float"}),
        fp8_rows,
    ),
    "fp8 tensor": Layout(
        "fp8",
        "compressed-tensors",
        _compressed("float-quantized", {**FP8_OF, "strategy": "tensor"}, {**FP8_OF, "strategy": "tensor"}),
        fp8_static,
    ),
    "fp8 blocks": Layout(
        "fp8-block",
        "compressed-tensors",
        _compressed(
            "float-quantized",
            {**FP8_OF, "strategy": "block", "block_structure": [BLOCK, BLOCK]},
            {**BY_TOKEN, "type": "float", "strategy": "group", "group_size": BLOCK},
        ),
        fp8_blocks_packed,
    ),
    "nvfp4": Layout(
        "nvfp4",
        "compressed-tensors",
        _compressed("nvfp4-pack-quantized", {**FP4_OF, "dynamic": False}, {**FP4_OF, "dynamic": "local"}),
        nvfp4_both,
    ),
    "nvfp4 weights": Layout(
        "nvfp4", "compressed-tensors", _compressed("nvfp4-pack-quantized", {**FP4_OF, "dynamic": False}), nvfp4_packed
    ),
    "mxfp4": Layout(
        "mxfp4",
        "compressed-tensors",
        _compressed(
            "mxfp4-pack-quantized",
            {**FP8_OF, "num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        ),
        mxfp4,
    ),
    "modelopt fp8": Layout("fp8", "modelopt", _modelopt("FP8"), fp8_static),
    "modelopt fp8 blocks": Layout("fp8-block", "modelopt", _modelopt("FP8_PB_WO"), fp8_blocks_packed),
    "modelopt nvfp4": Layout("nvfp4", "modelopt", _modelopt("NVFP4", GROUP), nvfp4),
    "modelopt nvfp4 weights": Layout("nvfp4", "modelopt", _modelopt("W4A16_NVFP4", GROUP), nvfp4_weights),
    "hf fp8": Layout("fp8", "fp8", _fp8(), fp8_tensor),
    "hf fp8 blocks": Layout("fp8-block", "fp8", _fp8(weight_block_size=[BLOCK, BLOCK]), fp8_blocks),
}
"""Name -> layout; `fc` is never quantised, as in every published drafter."""


def stored(
    tensors: Mapping[str, Tensor], layout: Layout, dense: Collection[str] = ()
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(a drafter's tensors in a layout, its plain tensors): products of layers are quantised, but `dense` ones."""
    kept, plain = dict[str, Tensor](), dict(tensors)
    shared = layout.store in (nvfp4, nvfp4_weights, nvfp4_packed, nvfp4_both, fp8_static, fp8_tensor)
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        parent, _, product = module.rpartition(".")
        if not name.endswith("_proj.weight") or product.endswith(tuple(dense)):
            kept[name] = tensor
            continue
        parts = next((parts for parts in FUSED.values() if shared and product in parts), (product,))
        if product != parts[0]:
            continue
        whole = layout.store(torch.cat([tensors[f"{parent}.{part}.weight"] for part in parts]).float())
        start, height = 0, whole.plain.shape[0]
        for part in parts:
            rows = len(tensors[f"{parent}.{part}.weight"])
            taken = slice(start, start + rows)
            plain[f"{parent}.{part}.weight"] = whole.plain[taken].clone()
            for key, value in whole.tensors.items():
                cut = value.dim() > 1 and len(value) == height
                kept[f"{parent}.{part}.{key}"] = (value[taken] if cut else value).clone()
            start += rows
    return kept, plain


def whole_blocks(target: Path, **heads: Any) -> DrafterConfig:
    """A drafter for a tiny target with products of whole groups and FP8 blocks, two of them at least."""
    raw = json.loads((target / "config.json").read_text())
    return tiny_drafter_config(
        num_target_layers=raw["num_hidden_layers"],
        target_layer_ids=(0, 1, 2),
        mask_token_id=SPECIALS.index("<mask>"),
        vocab_size=raw["vocab_size"],
        max_position_embeddings=raw["max_position_embeddings"],
        hidden_size=raw["hidden_size"],
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 256, **heads},
    )


PUBLISHED, PLAIN = "published", "plain.safetensors"
"""In a folder of `write`: the drafter, and the numbers that its tensors stand for."""


def write(
    folder: Path,
    config: DrafterConfig,
    layout: Layout | None,
    dense: Collection[str] = (),
    tensors: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes a drafter as it is published in a layout (None: plain); returns its folder below `folder`.

    Args:
        folder: for the drafter and for its numbers.
        config: the drafter.
        layout: of its products.
        dense: endings of products that stay as they are; `fc` always does.
        tensors: of the drafter, in floats; None = random ones.
    """
    published, tensors = folder / PUBLISHED, dict(tensors or random_tensors(config))
    write_drafter(published, config, tensors)
    kept, plain = (tensors, tensors) if layout is None else stored(tensors, layout, dense)
    save_file(kept, published / "model.safetensors")
    save_file(plain, folder / PLAIN)
    if layout is not None:
        recipe = json.loads(json.dumps(layout.recipe))
        listed = next(key for key in ("ignore", "modules_to_not_convert") if key in recipe)
        modules = [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]
        recipe[listed] += [module for module in modules if module.endswith(tuple(dense))]
        edit_json(published / "config.json", {"quantization_config": recipe})
    return published


PRODUCTS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def errors(model: Module, plain: Path) -> Iterator[tuple[str, float]]:
    """(product, relative error of an engine's own product) for every layer that it built."""
    numbers = load_file(plain)
    for index, layer in enumerate(model.layers):  # type: ignore[arg-type]
        for product in PRODUCTS:
            parent, _, last = product.rpartition(".")
            parts = FUSED.get(last, (last,))
            weight = torch.cat([numbers[f"layers.{index}.{parent}.{part}.weight"] for part in parts]).float()
            dtype = layer.get_parameter("input_layernorm.weight").dtype
            given = torch.randn(7, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
            with torch.inference_mode():
                made = layer.get_submodule(product)(given)[0].float()
            yield f"layers.{index}.{product}", relative(made, linear(given.float(), weight))
        sinks = f"layers.{index}.self_attn.attention_sink_bias"
        if sinks in numbers:
            yield sinks, relative(layer.get_parameter("self_attn.attention_sink_bias").float(), numbers[sinks].float())


def relative(made: Tensor, expected: Tensor) -> float:
    return float((made - expected).norm() / expected.norm())


def write_nemotron(folder: Path, target: Path, *, markov: bool) -> Path:
    """Writes a tiny drafter in the form of NVIDIA's for Nemotron 3.5, as `write` does.

    `fc`, the MLPs and the Markov head's second matrix are NVFP4 without scales of activations; attention, the first
    matrix and a copy of the target's embedding are plain. The plain drafter has no sinks and no block_size.
    """
    from tests.unit.checkpoint.published_heads import NEMOTRON_DFLASH, NEMOTRON_DSPARK

    layers = (AttentionKind(window=64, causal=True) if markov else AttentionKind(),) * 2
    heads = {"markov": {"kind": "vanilla", "rank": 32}, "attention_sinks": True} if markov else {}
    config = whole_blocks(target, layers=layers, **heads)
    kept, plain = stored(
        random_tensors(config), LAYOUTS["modelopt nvfp4 weights"], ("q_proj", "k_proj", "v_proj", "o_proj")
    )
    for module in ("fc", *(["markov_head.markov_w2"] if markov else [])):
        kept.pop(f"{module}.weight")
        found = nvfp4_weights(plain[f"{module}.weight"])
        plain[f"{module}.weight"] = found.plain
        kept |= {f"{module}.{leaf}": one for leaf, one in found.tensors.items()}
    kept["embed_tokens.weight"] = torch.randn(config.vocab_size, config.hidden_size)
    published, ids = folder / PUBLISHED, list(config.target_layer_ids)
    published.mkdir(parents=True)
    save_file(kept, published / "model.safetensors")
    save_file(plain, folder / PLAIN)
    raw = NEMOTRON_DSPARK if markov else NEMOTRON_DFLASH
    same, section = {"mask_token_id": config.mask_token_id, "target_layer_ids": ids}, raw["dflash_config"]
    assert isinstance(section, dict)
    excluded = ["*embed_tokens*", "*markov_w1*", "*self_attn*"]
    sizes = config.model_dump(
        include={
            *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
            *("vocab_size", "max_position_embeddings"),
        }
    )
    more: dict[str, object] = {"layer_types": [SLIDING] * 2, "sliding_window": 64, "block_size": config.block_size}
    more |= {"markov_rank": 32, "dspark_markov_rank": 32}
    fields = {
        **{**raw, **sizes, **(more if markov else {"layer_types": ["full_attention"] * 2}), **same},
        **{"num_hidden_layers": 2, "num_aux_layers": len(ids), "pard_token": same["mask_token_id"]},
        "eagle_aux_hidden_state_layer_ids": [index + 1 for index in ids],
        "dflash_config": {**section, **same, **({"swa_window_size": 64} if markov else {})},
        "quantization_config": {
            **{"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": GROUP},
            **{"exclude_modules": excluded, "ignore": excluded},
        },
    }
    (published / "config.json").write_text(json.dumps(fields))
    return published
