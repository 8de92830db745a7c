"""The core's drafter as two graphs of plain operators, for exporters: dense batches instead of flat rows.

`Block` fills blocks over a given context K/V, `Context` makes that K/V from features. Positions come in as cosines and
sines (`sin` signed, as by the core's RotaryEmbedding), windows, causality and ragged lengths as one additive mask: one
engine serves every kind of layer mask that its layers share, and has no tables of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig
from dflash_serve.errors import UserError
from dflash_serve.models.attention.sdpa import block_mask
from dflash_serve.models.drafter import Attention, Drafter, RMSNorm


def norm(module: RMSNorm, x: Tensor) -> Tensor:
    """RMS norm in fp32, as F.rms_norm computes it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.eps)
    return wide.to(x.dtype) * module.weight


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
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
        keys = torch.cat([past_k, turn(k, cos, sin)], dim=2).repeat_interleave(groups, dim=1)
        values = torch.cat([past_v, v], dim=2).repeat_interleave(groups, dim=1)
        # Scaled before the product: fp16 overflows at 65504.
        scores = (turn(q, cos, sin) * dim**-0.5) @ keys.transpose(-1, -2)
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
            keys.append(turn(norm(attention.k_norm, attention.k_proj(context).view(shape)), cos, sin))
            values.append(attention.v_proj(context).view(shape))
        return torch.stack(keys, dim=1), torch.stack(values, dim=1)


def dense_mask(lengths: Sequence[int], capacity: int, config: DrafterConfig) -> Tensor:
    """Additive mask [b, 1, B, capacity + B] of blocks whose contexts have these lengths, in slots of `capacity`."""
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
