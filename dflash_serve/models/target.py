"""The target: a dense decoder of the Llama and Qwen families over flat ragged rows and a preallocated K/V cache.

One forward serves prefill, decoding and block verification of any number of requests: the batch is the concatenation
of their rows, and only attention separates requests. Context features are taken at the chosen layers. Weights are fused
while they are loaded: qkv and gate_up are one product each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_serve.checkpoint.target_config import TargetConfig
from dflash_serve.models.attention import Attend, PlainOperators, ProjectedAttention
from dflash_serve.models.compiled.operators import compiled_operators, step_attention
from dflash_serve.models.kv_cache import KVCache, Span
from dflash_serve.models.layers import (
    RotaryEmbedding,
    as_module_list,
    pack_linears,
    rotate,
    rounded,
)

TargetAttend = Attend | ProjectedAttention


class TargetOutput(NamedTuple):
    """`hidden` [rows, H] after the final norm; `features` [rows, F*H] in the order of the layer ids, if any."""

    hidden: Tensor
    features: Tensor | None


class TargetLayer(nn.Module):
    """Pre-norm decoder layer with fused projections."""

    def __init__(self, config: TargetConfig, index: int) -> None:
        super().__init__()
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        self.index, self.head_dim = index, dim
        self.heads = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        self.input_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.qkv = nn.Linear(hidden, sum(self.heads) * dim, bias=config.qkv_bias)
        norms = as_module_list(nn.RMSNorm(dim, config.rms_norm_eps) for _ in "qk")
        self.qk_norm = norms if config.qk_norm else None
        self.o = nn.Linear(config.num_attention_heads * dim, hidden, bias=config.o_bias)
        self.post_attention_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=config.mlp_bias)
        self.down = nn.Linear(inner, hidden, bias=config.mlp_bias)

    def forward(
        self, h: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, attend: TargetAttend, operators: PlainOperators
    ) -> tuple[Tensor, Tensor]:
        """Rows h [rows, H] and the layer before's output, not yet added to them -> both for the layer after."""
        h, x = operators.add_norm(h, delta, self.input_norm)
        h, x = operators.add_norm(h, self.o(self._attend(self.qkv(x), cos, sin, attend)), self.post_attention_norm)
        return h, self.down(operators.silu_product(self.gate_up(x)))

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, attend: TargetAttend) -> Tensor:
        """Projected rows -> attention's output [rows, heads * head_dim]."""
        if isinstance(attend, ProjectedAttention):
            return attend.rotated(self.index, qkv, cos, sin, self.qk_norm)
        qkv = qkv.view(len(qkv), -1, self.head_dim)
        q, k, v = qkv.split(self.heads, dim=1)
        if self.qk_norm is not None:
            q, k = rotate(self.qk_norm[0](q), cos, sin), rotate(self.qk_norm[1](k), cos, sin)
        else:  # one rotation for both
            q, k = rotate(qkv[:, : self.heads[0] + self.heads[1]], cos, sin).split(self.heads[:2], dim=1)
        return attend(self.index, q, k, v).reshape(len(q), -1)


class TargetModel(nn.Module):
    """A target of `config`'s shape; `loader.load_target` fills it."""

    embedding: Tensor

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.register_parameter("embedding", nn.Parameter(torch.empty(config.vocab_size, config.hidden_size)))
        self.layers = as_module_list(TargetLayer(config, index) for index in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.head.weight = self.embedding
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_position_embeddings)
        self.operators = PlainOperators()

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embedding.device

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: TargetAttend, target_layer_ids: Sequence[int] = ()
    ) -> TargetOutput:
        """One pass over a flat batch.

        Args:
            token_ids: int64 [rows].
            positions: int64 [rows], of the rows in their sequences.
            attend: attention over each sequence's K/V and the rows themselves, whose K/V it stores.
            target_layer_ids: 0-based layers whose outputs are returned as features.
        """
        h, delta, features = self._run(self.layers, token_ids, positions, attend, target_layer_ids)
        return TargetOutput(self.operators.add_norm(h, delta, self.norm)[1], features)

    def features(
        self, token_ids: Tensor, positions: Tensor, attend: TargetAttend, target_layer_ids: Sequence[int]
    ) -> Tensor:
        """Only the features of `forward`, [rows, F*H]: layers after the deepest of the ids are not run."""
        layers = self.layers[: max(target_layer_ids) + 1]
        _, _, features = self._run(layers, token_ids, positions, attend, target_layer_ids)
        assert features is not None
        return features

    def _run(
        self,
        layers: Sequence[TargetLayer],
        token_ids: Tensor,
        positions: Tensor,
        attend: TargetAttend,
        target_layer_ids: Sequence[int],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Embedding and layers -> (rows, the last layer's output to add to them, features [rows, F*H])."""
        cos, sin = self.rotary(positions)
        h, delta = F.embedding(token_ids, self.embedding), None
        features = h.new_empty(len(h), len(target_layer_ids), h.shape[-1])
        for index, layer in enumerate(layers):
            h, delta = layer(h, delta, cos, sin, attend, self.operators)
            for slot, wanted in enumerate(target_layer_ids):
                if wanted == index:
                    torch.add(h, delta, out=features[:, slot])
        return h, delta, features.flatten(1) if target_layer_ids else None

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, H] after the final norm -> [rows, vocabulary]."""
        out: Tensor = self.head(hidden)
        return out

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """`logits` for drafts, which need not be exact: by rounded weights if these are read faster."""
        out: Tensor = self._draft_head(hidden)
        return out

    @cached_property
    def _draft_head(self) -> nn.Module:
        # Made at the first draft: a target without a drafter need not hold it.
        return rounded(self.head)

    def new_cache(self, entries: int, capacity: int) -> KVCache:
        """An empty K/V cache for `entries` sequences of up to `capacity` tokens."""
        return KVCache.of(self.config, entries, capacity, self.embedding.dtype, self.device)

    def pack(self, *, compiled: bool = True, operators: PlainOperators | None = None) -> None:
        """Changes weights' layout and operators for inference. The model cannot be trained afterwards.

        Args:
            compiled: use the compiled layers and operators if they can be compiled, on a CPU.
            operators: instead of these and of PyTorch's.
        """
        pack_linears(self, compiled=compiled)
        found = compiled_operators(self.embedding.dtype, self.device) if compiled else None
        self.operators = operators or found or PlainOperators()

    def attention(self, cache: KVCache, spans: Sequence[Span]) -> TargetAttend:
        """Attention of one step: a flat batch of spans over a cache."""
        config = self.config
        kinds, heads = config.layers, config.num_attention_heads
        return step_attention(self.operators, cache, spans, kinds, heads, config.rms_norm_eps)

    def norm_weight(self) -> Tensor:
        """Factors of the final norm [H]."""
        return self.norm.weight

    def layer_weights(self, index: int) -> dict[str, Tensor]:
        """Weights of a layer under z-lab's names, to initialise a drafter layer; only before `pack`."""
        layer, dim = self.layers[index], self.config.head_dim
        q, k, v = layer.qkv.weight.split([heads * dim for heads in layer.heads])
        gate, up = layer.gate_up.weight.chunk(2)
        return {
            "input_layernorm.weight": layer.input_norm.weight,
            "post_attention_layernorm.weight": layer.post_attention_norm.weight,
            "self_attn.q_proj.weight": q,
            "self_attn.k_proj.weight": k,
            "self_attn.v_proj.weight": v,
            "self_attn.o_proj.weight": layer.o.weight,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": layer.down.weight,
        }
