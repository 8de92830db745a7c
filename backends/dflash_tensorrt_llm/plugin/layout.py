"""Tensor parallelism of the drafter: which rows and columns of each weight live on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.formats import QuantizedTensor
from dflash_serve.errors import UserError

if TYPE_CHECKING:
    from dflash_serve.checkpoint.formats import Weight

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
