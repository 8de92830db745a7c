"""Tiny random drafters: quick to write, and shaped like nothing by accident (all sizes differ)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig, expected_tensors
from dflash_serve.checkpoint.declaring import declarations
from dflash_serve.checkpoint.formats import Format, quantize, stored_tensors
from dflash_serve.checkpoint.reader import open_checkpoint, weight_problems
from dflash_serve.checkpoint.storage import Scheme
from dflash_serve.checkpoint.tensors import FUSED
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.errors import Problem

SLIDING = AttentionKind(window=6, causal=True)
SLIDING_BOTH_WAYS = AttentionKind(window=6)
FULL = AttentionKind()


def tiny_drafter_config(**overrides: object) -> DrafterConfig:
    """2 layers, hidden 32, 4 heads and 2 K/V heads of 16, B = 4, features of target layers 1, 3, 5 of 8."""
    fields: dict[str, object] = {
        "block_size": 4,
        "target_layer_ids": (1, 3, 5),
        "num_target_layers": 8,
        "mask_token_id": 7,
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layers": (FULL, FULL),
        "max_position_embeddings": 256,
        "rope": {"theta": 10000.0},
    }
    return DrafterConfig.model_validate({**fields, **overrides})


def random_tensors(config: DrafterConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every tensor of a drafter: norms near 1, the rest near 0, so that deep stacks stay finite."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        if name == "d2t":  # every third token and the last ones
            tensors[name] = spread_map(shape[0], config.vocab_size)
            continue
        noise = torch.randn(shape, generator=generator) * (0.1 if "norm" in name else shape[-1] ** -0.5)
        tensors[name] = (noise + (1.0 if "norm" in name else 0.0)).to(dtype)
    return tensors


def spread_map(size: int, vocab_size: int) -> Tensor:
    """A `d2t` that spreads its draft ids evenly over the vocabulary."""
    return torch.arange(size) * (vocab_size - 1) // (size - 1) - torch.arange(size)


def write_tiny_drafter(
    folder: Path,
    config: DrafterConfig | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    dialect: str = "zlab",
) -> Path:
    """Writes a random drafter (of `tiny_drafter_config()` unless given) and returns the folder."""
    config = config or tiny_drafter_config()
    write_drafter(folder, config, random_tensors(config, seed=seed, dtype=dtype), dialect=dialect)
    return folder


def write_quantized_drafter(
    folder: Path, format: Format, config: DrafterConfig | None = None, *, fused: bool = True
) -> Path:
    """Writes a random drafter in FP8 or NVFP4 as `build` does: scales, quantization_config and hf_quant_config.json.

    `fused` as for `quantized_state`.
    """
    config = config or tiny_drafter_config(intermediate_size=64)
    write_tiny_drafter(folder, config)
    state = quantized_state(random_tensors(config), format, torch.tensor(0.01), fused=fused)
    save_file(state, folder / "model.safetensors")
    facts = {"quant_algo": format.upper(), "kv_cache_quant_algo": None, "exclude_modules": ["fc"]}
    edit_json(folder / "config.json", {"quantization_config": {"quant_method": "modelopt", **facts, "ignore": ["fc"]}})
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": facts}))
    return folder


def write_in_layout(
    folder: Path,
    scheme: Scheme,
    config: DrafterConfig | None = None,
    *,
    dense: Collection[str] = (),
    tensors: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes a drafter whose products are stored by a scheme, with the configuration of its quantiser.

    Args:
        folder: to write.
        scheme: of every product that is not in `dense`.
        config: the drafter; None = a tiny one whose sizes every format divides.
        dense: endings of products that stay as they are; `fc` always does.
        tensors: of the drafter, in floats; None = random ones.
    """
    config = config or even_config()
    tensors = tensors or random_tensors(config)
    state, quantised = dict[str, Tensor](), dict[str, Scheme]()
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if not _is_product(name) or module.endswith(tuple(dense)):
            state[name] = tensor
            continue
        weight = quantize(tensor, scheme.format, group=scheme.group)
        if scheme.static_inputs:
            weight = replace(weight, input_scale=torch.tensor(0.01))
        if scheme.strategy == "channel" and scheme.format == "fp8":
            rows = [quantize(row[None], "fp8") for row in tensor]
            values, scale = torch.cat([row.values for row in rows]), torch.stack([row.scale for row in rows])[:, None]
            weight = replace(weight, values=values, scale=scale)
        quantised[module] = scheme
        state |= {f"{module}.{leaf}": part for leaf, part in stored_tensors(scheme, weight).items()}
    write_tiny_drafter(folder, config, dialect="zlab" if config.markov is None else "deepspec")
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    for file, fields in declarations(config, quantised).items():
        known = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
        (folder / file).write_text(json.dumps({**known, **fields}))
    return folder


def even_config() -> DrafterConfig:
    """A tiny drafter whose sizes are multiples of 32, so that every format's groups fit."""
    return tiny_drafter_config(hidden_size=64, intermediate_size=160, head_dim=32)


def quantized_state(
    tensors: Mapping[str, Tensor], format: Format, input_scale: Tensor | None = None, *, fused: bool = True
) -> dict[str, Tensor]:
    """A drafter's tensors as `build` stores them: products that engines fuse share their scales.

    With `fused` false every product has scales of its own, as 0.1.0 wrote them.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parent, _, product = name.removesuffix(".weight").rpartition(".")
        group = next((parts for parts in FUSED.values() if fused and product in parts), (product,))
        if not _is_product(name):
            state[name] = tensor
        elif product == group[0]:
            rows = [tensors[f"{parent}.{part}.weight"] for part in group]
            whole, start = quantize(torch.cat(rows), format, input_scale), 0
            for part, weight in zip(group, rows, strict=True):
                stored = whole.rows(start, start + len(weight)).state(f"{parent}.{part}")
                state |= {key: value.clone() for key, value in stored.items()}  # a file has no shared storage
                start += len(weight)
    return state


def _is_product(name: str) -> bool:
    return name.endswith("_proj.weight")


def edit_json(path: Path, change: Mapping[str, object], *, remove: tuple[str, ...] = ()) -> None:
    """Sets keys of a JSON file; `a.b` reaches into objects."""
    raw = json.loads(path.read_text())
    for dotted, value in [*change.items(), *((key, None) for key in remove)]:
        *outer, last = dotted.split(".")
        inner = raw
        for key in outer:
            inner = inner.setdefault(key, {})
        if dotted in remove:
            inner.pop(last)
        else:
            inner[last] = value
    path.write_text(json.dumps(raw))


def problems_of(folder: Path) -> list[Problem]:
    """Everything that `inspect` finds wrong with a drafter, NaN and infinity included."""
    checkpoint = open_checkpoint(folder)
    return checkpoint.problems + weight_problems(checkpoint)
