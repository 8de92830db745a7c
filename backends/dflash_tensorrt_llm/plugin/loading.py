"""Whole weights to this rank's modules: the core's drafter, with its products replaced by cut and quantised ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.formats import QuantizedTensor
from dflash_serve.models.drafter import Drafter

from .layout import ROW_PARALLEL, Layout, in_captured_order
from .linear import Product, Reduce, RowParallel

if TYPE_CHECKING:
    from dflash_serve.checkpoint.formats import Weight

PROJECTIONS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}


@dataclass(frozen=True)
class Loaded:
    """A drafter ready to run, and what makes its context K/V."""

    drafter: Drafter
    context: Product
    """[N, H] -> K and V of all layers: [N, layers * 2 * kv_heads * head_dim]."""
    k_norms: Tensor
    """[layers, 1, head_dim]."""


def load(
    whole: Mapping[str, Weight],
    config: DrafterConfig,
    layout: Layout,
    reduce: Reduce | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Loaded:
    """Cuts, moves and assembles; `whole` has every tensor by our name (`quantization.checkpoint.assemble`)."""
    mine = {name: _to(layout.shard(name, weight, config), device) for name, weight in whole.items()}
    with torch.device("meta"):
        drafter = Drafter(config)
    for index, layer in enumerate(drafter.layers):
        for room, names in PROJECTIONS.items():
            for name in names:
                module = _product([f"layers.{index}.{room}.{name}"], mine, dtype)
                parallel = RowParallel(module, reduce) if name in ROW_PARALLEL else module
                setattr(getattr(layer, room), name, parallel)
    fc = in_captured_order(_plain(mine["fc.weight"], dtype), config)
    state = {"fc.weight": fc}
    state |= {name: _plain(mine[name], dtype) for name in mine if "norm" in name or name == "mask_embedding"}
    _fill(drafter, state)
    drafter.rotary.to(device)
    parts = [f"layers.{i}.self_attn.{name}" for i in range(config.num_layers) for name in ("k_proj", "v_proj")]
    k_norms = torch.stack([state[f"layers.{i}.self_attn.k_norm.weight"] for i in range(config.num_layers)])[:, None]
    return Loaded(drafter.eval(), _product(parts, mine, dtype), k_norms)


def _product(names: list[str], mine: Mapping[str, Weight], dtype: torch.dtype) -> Product:
    biases = [mine[f"{name}.bias"] for name in names if f"{name}.bias" in mine]
    bias = torch.cat([_plain(bias, dtype) for bias in biases]) if biases else None
    return Product([mine[f"{name}.weight"] for name in names], bias, dtype)


def _fill(drafter: Drafter, state: Mapping[str, Tensor]) -> None:
    """Every parameter that is left (norms, fc, mask embedding) gets its tensor."""
    for name in [name for name, _ in drafter.named_parameters()]:
        room, _, leaf = name.rpartition(".")
        owner = drafter.get_submodule(room)
        owner.register_parameter(leaf, nn.Parameter(state[name], requires_grad=False))


def _plain(weight: Weight, dtype: torch.dtype) -> Tensor:
    return weight.dequantize(dtype) if isinstance(weight, QuantizedTensor) else weight.to(dtype)


def _to(weight: Weight, device: torch.device) -> Weight:
    if not isinstance(weight, QuantizedTensor):
        return weight.to(device)
    moved = [None if t is None else t.to(device) for t in (weight.scale_2, weight.input_scale)]
    return QuantizedTensor(weight.format, weight.values.to(device), weight.scale.to(device), *moved)
