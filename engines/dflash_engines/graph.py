"""The core's drafter as two graphs of plain operators, for exporters, and samples to compare them with the core on.

`Block` fills blocks over a given context K/V, `Context` makes that K/V from features, in dense batches instead of flat
rows. Positions come in as cosines and sines (`sin` signed, as by the core's RotaryEmbedding), windows, causality and
ragged lengths as one additive mask: one engine serves every kind of layer mask that its layers share, and has no tables
of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig
from dflash_serve.deployment import Limits
from dflash_serve.errors import UserError
from dflash_serve.models.attention.ragged import RaggedAttention, block_mask
from dflash_serve.models.drafter import Attention, Drafter
from dflash_serve.models.kv_cache import KVCache, Span, span_positions
from dflash_serve.models.layers import RMSNorm

from .recipe import BATCH

GRAPHS = ("block", "context")
SAMPLE = "sample.safetensors"
Shape = tuple[int, ...]


def norm(module: RMSNorm, x: Tensor) -> Tensor:
    """RMS norm in fp32, as F.rms_norm computes it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.eps)
    return wide.to(x.dtype) * module.weight


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The core's `rotate` without roll: halves (a, b) -> (a, b) cos + (b, a) sin, sin signed."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([b, a], dim=-1) * sin


def single_kind(config: DrafterConfig) -> AttentionKind:
    """The one kind that all layers have.

    Raises:
        UserError: there are several, and so would be the masks.
    """
    kinds = set(config.layers)
    if len(kinds) > 1:
        what = "layers of several kinds (windowed and full) would need a mask each"
        raise UserError(what, where="build.onnx", do="leave it out for this drafter")
    return kinds.pop()


class Block(nn.Module):
    """Blocks in, hidden states out: [b, B, H] -> [b, B, H].

    Context K/V [layers, b, kv_heads, s, head_dim]; cos, sin [b, 1, B, head_dim]; mask [b, 1, B, s + B].
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        single_kind(drafter.config)
        self.drafter, self.config = drafter, drafter.config

    def forward(
        self, noise: Tensor, context_k: Tensor, context_v: Tensor, cos: Tensor, sin: Tensor, mask: Tensor
    ) -> Tensor:
        h = noise
        for index, layer in enumerate(self.drafter.layers):
            x = norm(layer.input_layernorm, h)
            attended = self._attend(layer.self_attn, x, context_k[index], context_v[index], cos, sin, mask)
            h = h + layer.self_attn.o_proj(attended)
            x = norm(layer.post_attention_layernorm, h)
            h = h + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x))
        return norm(self.drafter.norm, h)

    def _attend(
        self, attention: Attention, x: Tensor, past_k: Tensor, past_v: Tensor, cos: Tensor, sin: Tensor, mask: Tensor
    ) -> Tensor:
        config, dim = self.config, self.config.head_dim
        groups = config.num_attention_heads // config.num_key_value_heads
        batch, block = x.shape[0], config.block_size
        q = norm(attention.q_norm, attention.q_proj(x).view(batch, block, -1, dim)).transpose(1, 2)
        k = norm(attention.k_norm, attention.k_proj(x).view(batch, block, -1, dim)).transpose(1, 2)
        v = attention.v_proj(x).view(batch, block, -1, dim).transpose(1, 2)
        keys = torch.cat([past_k, rotate_halves(k, cos, sin)], dim=2).repeat_interleave(groups, dim=1)
        values = torch.cat([past_v, v], dim=2).repeat_interleave(groups, dim=1)
        # Scaled before the product: fp16 overflows at 65504.
        scores = (rotate_halves(q, cos, sin) * dim**-0.5) @ keys.transpose(-1, -2)
        weights = torch.softmax(scores.float() + mask.float(), dim=-1).to(x.dtype)
        return (weights @ values).transpose(1, 2).reshape(batch, block, -1)


class Context(nn.Module):
    """features [n, F*H], cos and sin [n, 1, head_dim] -> keys and values [n, layers, kv_heads, head_dim]."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter, self.config = drafter, drafter.config

    def forward(self, features: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # A leading axis keeps every product a MatMul; of two-dimensional rows exporters make other operators.
        context = norm(self.drafter.hidden_norm, self.drafter.fc(features[None]))
        keys, values = [], []
        for layer in self.drafter.layers:
            attention = layer.self_attn
            shape = (features.shape[0], -1, self.config.head_dim)
            keys.append(rotate_halves(norm(attention.k_norm, attention.k_proj(context).view(shape)), cos, sin))
            values.append(attention.v_proj(context).view(shape))
        return torch.stack(keys, dim=1), torch.stack(values, dim=1)


def shape_ranges(graph: str, drafter: DrafterConfig, limits: Limits) -> dict[str, tuple[Shape, Shape, Shape]]:
    """Least, usual and largest shape of every input of a graph: requests up to the batch, tokens to max_model_len."""
    most, length = limits.max_batch_size or BATCH, limits.max_model_len or 8192
    usual = min(1024, length) if graph == "block" else min(8 * most, length)
    shapes = [_shapes(graph, drafter, *size) for size in ((1, 1), (min(8, most), usual), (most, length))]
    return {name: (shapes[0][name], shapes[1][name], shapes[2][name]) for name in shapes[0]}


def _shapes(graph: str, drafter: DrafterConfig, batch: int, tokens: int) -> dict[str, Shape]:
    block, dim = drafter.block_size, drafter.head_dim
    if graph == "context":
        return {"features": (tokens, drafter.feature_size), "cos": (tokens, 1, dim), "sin": (tokens, 1, dim)}
    past = (drafter.num_layers, batch, drafter.num_key_value_heads, tokens, dim)
    rotation, mask = (batch, 1, block, dim), (batch, 1, block, tokens + block)
    noise = (batch, block, drafter.hidden_size)
    return {"noise": noise, "context_k": past, "context_v": past, "cos": rotation, "sin": rotation, "mask": mask}


def dense_mask(lengths: Sequence[int], capacity: int, config: DrafterConfig) -> Tensor:
    """Additive mask [b, 1, B, capacity + B] of blocks whose contexts have these lengths, padded to `capacity`."""
    kind, block = single_kind(config), config.block_size
    rows = []
    for length in lengths:
        keys = torch.cat([torch.arange(capacity), torch.arange(length, length + block)])
        visible = block_mask(torch.arange(length, length + block), keys, kind)
        seen = torch.ones(block, len(keys), dtype=torch.bool) if visible is None else visible
        seen[:, length:capacity] = False
        rows.append(torch.zeros(seen.shape).masked_fill_(~seen, float("-inf")))
    # -inf times 0 is NaN in some kernels, and fp16 has it: a large negative number does as well.
    return torch.stack(rows)[:, None].clamp(min=-30000.0)


@dataclass(frozen=True)
class Sample:
    """Features of one answer of the target, and blocks at several places of it."""

    features: Tensor
    """[tokens, F*H] of one answer."""
    noise: Tensor
    """[blocks, B, H]."""
    anchors: tuple[int, ...]
    """Position of each block's slot 0: so many context tokens it has."""

    def save(self, folder: Path) -> None:
        """Writes it into a step's folder."""
        tensors = {"features": self.features, "noise": self.noise, "anchors": torch.tensor(self.anchors)}
        save_file(tensors, folder / SAMPLE)

    @classmethod
    def load(cls, folder: Path) -> Sample:
        """What `save` wrote."""
        found = load_file(folder / SAMPLE)
        return cls(found["features"], found["noise"], tuple(found["anchors"].tolist()))


@torch.inference_mode()
def by_core(drafter: Drafter, sample: Sample) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [blocks, B, H] of the core drafter, and the context's keys and values [tokens, layers, kv, dim]."""
    config, tokens = drafter.config, len(sample.features)
    dtype = drafter.fc.weight.dtype
    k, v = drafter.context_kv(drafter.project_context(sample.features.to(dtype)), torch.arange(tokens))
    cache = KVCache(
        layers=config.num_layers, entries=len(sample.anchors), kv_heads=config.num_key_value_heads,
        capacity=tokens + config.block_size, head_dim=config.head_dim, dtype=dtype,
    )  # fmt: skip
    for entry, anchor in enumerate(sample.anchors):
        cache.write_all([Span(entry, 0, anchor)], k[:anchor], v[:anchor])
    spans = [Span(entry, anchor, config.block_size) for entry, anchor in enumerate(sample.anchors)]
    attend = RaggedAttention(cache, spans, config.layers, config.num_attention_heads)
    hidden = drafter(sample.noise.flatten(0, 1).to(dtype), span_positions(spans), attend)
    return hidden.view(sample.noise.shape), k, v


def block_inputs(drafter: Drafter, sample: Sample, k: Tensor, v: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs of `Block` for the sample, contexts padded to the longest."""
    config, capacity = drafter.config, max(sample.anchors)
    past_k, past_v = (_padded(tensor, sample.anchors, capacity) for tensor in (k, v))
    positions = torch.tensor(sample.anchors)[:, None] + torch.arange(config.block_size)
    cos, sin = (t.view(*positions.shape, -1)[:, None] for t in drafter.rotary(positions.flatten()))
    mask = dense_mask(sample.anchors, capacity, config)
    named = {"noise": sample.noise, "context_k": past_k, "context_v": past_v, "cos": cos, "sin": sin, "mask": mask}
    return {name: tensor.to(dtype) for name, tensor in named.items()}


def _padded(kv: Tensor, anchors: Sequence[int], capacity: int) -> Tensor:
    """[tokens, layers, kv, dim] -> [layers, blocks, kv, capacity, dim], zero behind each anchor."""
    dense = kv[:capacity].permute(1, 2, 0, 3)[:, None].repeat(1, len(anchors), 1, 1, 1)
    for index, anchor in enumerate(anchors):
        dense[:, index, :, anchor:] = 0
    return dense


def context_inputs(drafter: Drafter, sample: Sample, dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs of `Context` for the sample."""
    cos, sin = drafter.rotary(torch.arange(len(sample.features)))
    return {"features": sample.features.to(dtype), "cos": cos.to(dtype), "sin": sin.to(dtype)}
