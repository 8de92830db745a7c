"""The drafter's weights on one rank: which rows and columns live here, and the core's drafter with its products cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.formats import QuantizedTensor, Weight, dequantized
from dflash_serve.errors import UserError
from dflash_serve.models.drafter import Drafter

Reduce = Callable[[Tensor], Tensor]
PROJECTIONS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
COLUMN_PARALLEL = ("q_proj", "gate_proj", "up_proj")
ROW_PARALLEL = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Layout:
    """Rank `rank` of `size`; size 1 = the whole drafter."""

    rank: int = 0
    size: int = 1

    def check(self, config: DrafterConfig) -> None:
        """Refuses a drafter that cannot be split.

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
            return _rows(weight, first, self.kv_heads(config) * config.head_dim)
        if module in COLUMN_PARALLEL:
            step = weight.shape[0] // self.size
            return _rows(weight, self.rank * step, step)
        if module in ROW_PARALLEL and name.endswith(".weight"):
            step = weight.shape[1] // self.size
            start, stop = self.rank * step, (self.rank + 1) * step
            return weight.columns(start, stop) if isinstance(weight, QuantizedTensor) else weight[:, start:stop]
        return weight  # norms, fc, and o_proj's bias, which is added once, after the sum


def _rows(weight: Weight, start: int, count: int) -> Weight:
    stop = start + count
    return weight.rows(start, stop) if isinstance(weight, QuantizedTensor) else weight[start:stop]


class Product(nn.Module):
    """x @ weight^T. Over a share of the input, `reduce` adds the ranks' results; the bias is added once, after it."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, reduce: Reduce | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight.contiguous())
        self.register_buffer("bias", bias)
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        if self.reduce is None:
            return F.linear(x, self.weight, self.bias)
        y = self.reduce(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


def rank_weights(
    whole: Mapping[str, Weight], names: Iterable[str], config: DrafterConfig, layout: Layout, dtype: torch.dtype
) -> dict[str, Tensor]:
    """This rank's parts of tensors, by our names, quantised ones decoded."""
    return dequantized({name: layout.shard(name, whole[name], config) for name in names}, dtype)


def context_names(config: DrafterConfig, leaf: str = "weight") -> list[str]:
    """Names of the K and V weights of all layers, in the order of their rows in the one product for the context."""
    return [f"layers.{i}.self_attn.{name}.{leaf}" for i in range(config.num_layers) for name in ("k_proj", "v_proj")]


def load(
    whole: Mapping[str, Weight],
    config: DrafterConfig,
    layout: Layout,
    reduce: Reduce | None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Drafter, Product]:
    """This rank's drafter, cut, decoded, moved and assembled, and the product that makes its context K/V.

    Args:
        whole: every tensor by our name.
        layout: this rank's part.
        reduce: adds the ranks' partial results; None = one rank.

    Returns:
        The drafter, and the product [N, H] -> K and V of all layers [N, layers * 2 * kv_heads * head_dim].
    """
    decoded = rank_weights(whole, whole, config, layout, dtype)
    mine = {name: tensor.to(device) for name, tensor in decoded.items()}
    with torch.device("meta"):
        drafter = Drafter(config)
    for index, layer in enumerate(drafter.layers):
        for parent, names in PROJECTIONS.items():
            for name in names:
                path = f"layers.{index}.{parent}.{name}"
                summed = reduce if name in ROW_PARALLEL else None
                product = Product(mine[f"{path}.weight"], mine.get(f"{path}.bias"), summed)
                setattr(getattr(layer, parent), name, product)
    drafter.load_state_dict({name: mine[name] for name, _ in drafter.named_parameters()}, assign=True, strict=False)
    drafter.rotary.to(device)
    biases = [mine[name] for name in context_names(config, "bias") if name in mine]
    rows = torch.cat([mine[name] for name in context_names(config)])
    return drafter.eval().requires_grad_(False), Product(rows, torch.cat(biases) if biases else None)
