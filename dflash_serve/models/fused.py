"""A drafter laid out for decoding: fewer, larger products over packed weights, with `drafter`'s maths.

A block of 8 rows is so little work that starting a matrix product costs as much as computing it. So q, k, v become one
product, gate and up another, and the context K/V of all layers a third (SGLang and TensorRT-LLM fuse it on GPUs). The
operators between a layer's products are compiled on a CPU if a compiler is found, and Triton's on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.models.attention import Attend, PlainOperators, ProjectedAttention
from dflash_serve.models.compiled.operators import CompiledOperators, compiled_operators, step_attention
from dflash_serve.models.drafter import MLP, Attention, Drafter, Layer
from dflash_serve.models.kv_cache import KVCache, Span
from dflash_serve.models.layers import pack_linears, rotate, stack_linears


class FusedAttention(Attention):
    """Attention whose block projection is one product."""

    def __init__(self, attention: Attention, config: DrafterConfig) -> None:
        with torch.device("meta"):  # every parameter is replaced
            super().__init__(config)
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.heads = [part.out_features // attention.head_dim for part in parts]
        self.qkv = stack_linears(parts)
        del self.q_proj, self.k_proj, self.v_proj
        self.o_proj, self.q_norm, self.k_norm = attention.o_proj, attention.q_norm, attention.k_norm

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).view(len(x), -1, self.head_dim).split(self.heads, dim=1)
        return rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin), v


class FusedMLP(nn.Module):
    """SwiGLU with one product for gate and up."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.gate_up, self.down_proj = stack_linears([mlp.gate_proj, mlp.up_proj]), mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class FastLayer(nn.Module):
    """A fused `Layer` with faster norms, SwiGLU and attention; it also accepts an `Attend`."""

    def __init__(self, layer: Layer, operators: PlainOperators) -> None:
        super().__init__()
        self.index, self.operators, self.self_attn, self.mlp = layer.index, operators, layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, attend: Attend | ProjectedAttention, rows: int) -> Tensor:
        """[rows, H] -> [rows, H], equal to `Layer`'s."""
        attention, mlp, operators = self.self_attn, self.mlp, self.operators
        assert isinstance(attention, FusedAttention)
        assert isinstance(mlp, FusedMLP)
        h = h.clone() if isinstance(operators, CompiledOperators) else h  # these change it in place
        h, x = operators.add_norm(h, None, self.input_layernorm)
        if isinstance(attend, ProjectedAttention):
            y = attend.rotated(self.index, attention.qkv(x), cos, sin, (attention.q_norm, attention.k_norm))
        else:
            y = attend(self.index, *attention.project(x, cos, sin)).reshape(len(x), -1)
        h, x = operators.add_norm(h, attention.o_proj(y), self.post_attention_layernorm)
        out: Tensor = h + mlp.down_proj(operators.silu_product(mlp.gate_up(x)))
        return out


class FusedDrafter(Drafter):
    """A drafter for inference that takes over another drafter's weights; the other cannot be used any more.

    Args:
        compiled: use our compiled layers and operators if they can be compiled, on a CPU.
        operators: instead of these and of PyTorch's.
    """

    def __init__(self, drafter: Drafter, *, compiled: bool = True, operators: PlainOperators | None = None) -> None:
        with torch.device("meta"):  # every parameter is replaced
            super().__init__(drafter.config)
        self.rotary, self.mask_embedding = drafter.rotary, drafter.mask_embedding
        self.lm_head, self.d2t, self.token_ids = drafter.lm_head, drafter.d2t, drafter.token_ids
        self.hot_tokens = drafter.hot_tokens
        self.markov_head, self.candidate_selector = drafter.markov_head, drafter.candidate_selector
        self.confidence_head = None  # not used in decoding
        self.fc, self.hidden_norm, self.norm = drafter.fc, drafter.hidden_norm, drafter.norm
        attentions = [layer.self_attn for layer in drafter.layers]
        self.context = stack_linears([linear for a in attentions for linear in (a.k_proj, a.v_proj)])
        k_norms = torch.stack([a.k_norm.weight for a in attentions])[:, None]
        self.k_norm_weights = nn.Parameter(k_norms, requires_grad=False)  # [layers, 1, head_dim]
        self.layers = drafter.layers
        for layer, attention in zip(self.layers, attentions, strict=True):
            layer.self_attn, layer.mlp = FusedAttention(attention, self.config), FusedMLP(layer.mlp)  # type: ignore[assignment]
        pack_linears(self, compiled=compiled)
        weight = self.norm.weight
        found = operators or (compiled_operators(weight.dtype, weight.device) if compiled else None)
        if found is not None and self.config.convolution is None:
            self.operators = found
            self.layers = nn.ModuleList(FastLayer(layer, found) for layer in self.layers)  # type: ignore[assignment]

    def attention(self, cache: KVCache, spans: Sequence[Span]) -> Attend | ProjectedAttention:
        config = self.config
        kinds, heads = config.layers, config.num_attention_heads
        return step_attention(self.operators, cache, spans, kinds, heads, config.rms_norm_eps)

    def context_kv(self, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        shape = (len(context), config.num_layers, 2, config.num_key_value_heads, config.head_dim)
        k, v = self.context(context).view(shape).unbind(dim=2)
        k = F.rms_norm(k, (config.head_dim,), eps=config.rms_norm_eps) * self.k_norm_weights
        cos, sin = self.rotary(positions)
        return rotate(k, cos[:, None], sin[:, None]), v
