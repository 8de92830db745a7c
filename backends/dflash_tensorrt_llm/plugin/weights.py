"""The drafter's weights on one rank: which rows and columns live here, and the core's drafter with its products cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.formats import QuantizedTensor, Weight
from dflash_serve.errors import UserError
from dflash_serve.models.drafter import Drafter

from .operators import Product, Reduce, RowParallel

PROJECTIONS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
COLUMN_PARALLEL = ("gate_proj", "up_proj")
ROW_PARALLEL = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Layout:
    """Rank `rank` of `size`; size 1 = the whole drafter."""

    rank: int = 0
    size: int = 1

    def check(self, config: DrafterConfig) -> None:
        """Refuses what cannot be split.

        Raises:
            UserError: heads or MLP columns do not split, or K/V heads neither split nor repeat.
        """
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        splits = heads % self.size == 0 and config.intermediate_size % self.size == 0
        if not splits or (kv % self.size and self.size % kv):
            what = f"{heads} heads, {kv} K/V heads and {config.intermediate_size} MLP columns over {self.size} devices"
            raise UserError(what, where="drafter", do="use fewer devices, or attention data parallelism")

    def kv_heads(self, config: DrafterConfig) -> int:
        """K/V heads of this rank: its share, or one that it shares with its neighbours."""
        return max(1, config.num_key_value_heads // self.size)

    def shard(self, name: str, weight: Weight, config: DrafterConfig) -> Weight:
        """This rank's part of a weight or bias."""
        module = name.split(".")[-2] if "." in name else ""
        if self.size == 1:
            return weight
        if module in ("k_proj", "v_proj"):
            # With more ranks than heads, neighbours hold the same head: rank r has head r * heads // size.
            first = self.rank * config.num_key_value_heads // self.size * config.head_dim
            return _rows(weight, first, first + self.kv_heads(config) * config.head_dim)
        if module == "q_proj" or module in COLUMN_PARALLEL:
            return _rows(weight, *self._part(weight.shape[0]))
        if module in ROW_PARALLEL and name.endswith(".weight"):
            return _columns(weight, *self._part(weight.shape[1]))
        return weight  # norms, fc, and o_proj's bias, which is added once, after the sum

    def _part(self, length: int) -> tuple[int, int]:
        step = length // self.size
        return self.rank * step, (self.rank + 1) * step


def _rows(weight: Weight, start: int, stop: int) -> Weight:
    return weight.rows(start, stop) if isinstance(weight, QuantizedTensor) else weight[start:stop]


def _columns(weight: Weight, start: int, stop: int) -> Weight:
    return weight.columns(start, stop) if isinstance(weight, QuantizedTensor) else weight[:, start:stop]


def in_captured_order(fc: Tensor, config: DrafterConfig) -> Tensor:
    """fc.weight [H, F*H] for features in ascending layer order, which is how TensorRT-LLM captures them (dflash.py)."""
    order = sorted(range(len(config.target_layer_ids)), key=lambda index: config.target_layer_ids[index])
    return fc.view(len(fc), len(order), -1)[:, order].reshape(fc.shape)


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
    """This rank's drafter, cut, moved and assembled; `whole` has every tensor by our name."""
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
