"""The drafter's weights on one rank: which rows and columns live here, and the core's drafter with its products cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.formats import FP8_MAX, QuantizedTensor, Weight, dequantized
from dflash_serve.errors import UserError
from dflash_serve.models.drafter import Drafter

Reduce = Callable[[Tensor], Tensor]
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
    parts = fc.chunk(len(order), dim=1)
    return torch.cat([parts[index] for index in order], dim=1)


class Product(nn.Module):
    """x @ weights^T for weights stacked along their rows.

    FP8 weights with an input scale are multiplied as FP8, and each stacked part's own scale is applied to its columns
    of the result: that is what upstream's fused K/V product leaves out. NVFP4, and FP8 without an input scale, are
    decoded once and multiplied in `dtype`.

    Args:
        weights: parts [out, in], all of one kind.
        bias: of all parts together.
        dtype: of activations and results.
    """

    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None
    input_scale: Tensor | None

    def __init__(self, weights: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        fp8 = [w for w in weights if isinstance(w, QuantizedTensor) and w.format == "fp8" and w.input_scale is not None]
        scales = input_scale = None
        if fp8 and len(fp8) == len(weights):
            stacked = torch.cat([w.values for w in fp8])
            scales = torch.cat([w.scale.float().reshape(1).expand(len(w.values)) for w in fp8])
            inputs = [w.input_scale.float().reshape(()) for w in fp8 if w.input_scale is not None]
            input_scale = torch.stack(inputs).max()
        else:
            plain = [w.dequantize(dtype) if isinstance(w, QuantizedTensor) else w.to(dtype) for w in weights]
            stacked = plain[0] if len(plain) == 1 else torch.cat(plain)
        self.register_buffer("weight", stacked.contiguous())
        self.register_buffer("scales", scales)
        self.register_buffer("input_scale", input_scale)
        self.register_buffer("bias", None if bias is None else bias.to(dtype))
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        if self.scales is None or self.input_scale is None:
            return F.linear(x, self.weight, self.bias)
        rounded = (x.float() / self.input_scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        one = torch.ones_like(self.input_scale)
        y = torch._scaled_mm(rounded, self.weight.t(), scale_a=self.input_scale, scale_b=one, out_dtype=torch.float32)
        y = (y * self.scales).to(self.dtype)
        return y if self.bias is None else y + self.bias


class RowParallel(nn.Module):
    """A product over this rank's share of the input; the ranks' results are added, and the bias once."""

    bias: Tensor | None

    def __init__(self, product: Product, reduce: Reduce) -> None:
        super().__init__()
        self.product, self.reduce = product, reduce
        self.register_buffer("bias", product.bias)
        product.bias = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.reduce(self.product(x))
        return y if self.bias is None else y + self.bias


def load(
    whole: Mapping[str, Weight],
    config: DrafterConfig,
    layout: Layout,
    reduce: Reduce | None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Drafter, Product]:
    """This rank's drafter, cut, moved and assembled, and what makes its context K/V.

    Args:
        whole: every tensor by our name.
        layout: this rank's part.
        reduce: adds the ranks' partial results; None = one rank.

    Returns:
        The drafter, and the product [N, H] -> K and V of all layers [N, layers * 2 * kv_heads * head_dim].
    """
    mine = {name: _to(layout.shard(name, weight, config), device) for name, weight in whole.items()}
    with torch.device("meta"):
        drafter = Drafter(config)
    for index, layer in enumerate(drafter.layers):
        for parent, names in PROJECTIONS.items():
            for name in names:
                product = _product([f"layers.{index}.{parent}.{name}"], mine, dtype)
                parallel = RowParallel(product, reduce) if reduce and name in ROW_PARALLEL else product
                setattr(getattr(layer, parent), name, parallel)
    left = {name: mine[name] for name, _ in drafter.named_parameters()}  # norms, fc, mask embedding
    state = dequantized(left, dtype)
    state["fc.weight"] = in_captured_order(state["fc.weight"], config)
    drafter.load_state_dict(state, assign=True, strict=False)
    drafter.rotary.to(device)
    parts = [f"layers.{i}.self_attn.{name}" for i in range(config.num_layers) for name in ("k_proj", "v_proj")]
    return drafter.eval().requires_grad_(False), _product(parts, mine, dtype)


def context_weight(whole: Mapping[str, Weight], config: DrafterConfig, layout: Layout, dtype: torch.dtype) -> Tensor:
    """This rank's K and V rows of all layers, dequantised: [layers * 2 * kv_heads * head_dim, H]."""
    names = [f"layers.{i}.self_attn.{name}.weight" for i in range(config.num_layers) for name in ("k_proj", "v_proj")]
    mine = {name: layout.shard(name, whole[name], config) for name in names}
    return torch.cat(list(dequantized(mine, dtype).values()))


def _product(names: list[str], mine: Mapping[str, Weight], dtype: torch.dtype) -> Product:
    biases = dequantized({name: mine[f"{name}.bias"] for name in names if f"{name}.bias" in mine}, dtype)
    bias = torch.cat(list(biases.values())) if biases else None
    return Product([mine[f"{name}.weight"] for name in names], bias, dtype)


def _to(weight: Weight, device: torch.device) -> Weight:
    if not isinstance(weight, QuantizedTensor):
        return weight.to(device)
    moved = [None if t is None else t.to(device) for t in (weight.scale_2, weight.input_scale)]
    return QuantizedTensor(weight.format, weight.values.to(device), weight.scale.to(device), *moved)
