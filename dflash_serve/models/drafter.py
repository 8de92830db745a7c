"""The drafter: a small block-diffusion transformer that fills a whole block of masked slots in one pass.

Paper (arXiv 2602.06036) section 4; reference `dflash/model.py` (dflash 0.1.0). Parameter names are z-lab's:
`fc`, `hidden_norm`, `layers.N.*`, `norm`. Embedding and head are the target's and stay with the caller, and so does the
context K/V: the drafter hands out what belongs into it (`context_kv`) and asks the caller to attend (`Attend`), so that
one model serves a preallocated cache, a paged pool, an engine's own buffers and the training mask alike.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.models.attention import Attend
from dflash_serve.models.layers import RMSNorm, RotaryEmbedding, as_module_list, rotate


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Attention(nn.Module):
    """Grouped-query attention with q/k norms. The same k_proj and v_proj serve context and block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, hidden, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed block rows x [rows, H] -> q [rows, heads, head_dim] and k, v [rows, kv_heads, head_dim], rotated."""
        q = self.q_norm(self.q_proj(x).view(len(x), -1, self.head_dim))
        return rotate(q, cos, sin), *self.key_value(x, cos, sin)

    def key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [rows, H], a normed block row or a context row -> rotated keys and values [rows, kv_heads, head_dim]."""
        keys = rotate(self.k_norm(self.k_proj(x).view(len(x), -1, self.head_dim)), cos, sin)
        return keys, self.v_proj(x).view(len(x), -1, self.head_dim)


class Layer(nn.Module):
    """Pre-norm decoder layer; the norms apply to the block only, never to the context."""

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.self_attn = Attention(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = self.input_layernorm(h)
        q, k, v = self.self_attn.project(x, cos, sin)
        h = h + self.self_attn.o_proj(attend(self.index, q, k, v).reshape(len(h), -1))
        out: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return out


class Drafter(nn.Module):
    """A DFlash drafter over flat rows: a batch of blocks is the concatenation of their rows.

    `config` says what it is; parameters are uninitialised until a checkpoint is read or `training` initialises them.
    """

    mask_embedding: Tensor | None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = as_module_list(Layer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_position_embeddings)
        shape = torch.empty(config.hidden_size) if config.has_mask_embedding else None
        self.register_parameter("mask_embedding", None if shape is None else nn.Parameter(shape))

    def project_context(self, features: Tensor) -> Tensor:
        """Context features [rows, F*H] of verified tokens -> what every layer reads of them, [rows, H]."""
        out: Tensor = self.hidden_norm(self.fc(features))
        return out

    def context_kv(self, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of projected context rows, once and for all: each [rows, layers, kv_heads, head_dim].

        Args:
            context: [rows, H] from `project_context`.
            positions: int [rows], the tokens' positions in their sequences.
        """
        cos, sin = self.rotary(positions)
        pairs = [layer.self_attn.key_value(context, cos, sin) for layer in self.layers]
        return torch.stack([k for k, _ in pairs], dim=1), torch.stack([v for _, v in pairs], dim=1)

    def noise(self, anchors: Tensor, embedding: Tensor, block_size: int | None = None) -> Tensor:
        """Input rows [blocks * B, H] of blocks [anchor, mask x (B-1)], in the embedding's dtype.

        Args:
            anchors: token ids [blocks], the last verified token of each sequence.
            embedding: the target's embedding table [vocabulary, H].
            block_size: B, where it is served smaller than the drafter was trained for.
        """
        block, size = block_size or self.config.block_size, self.config.hidden_size
        mask = self.mask_embedding
        if mask is None:
            assert self.config.mask_token_id is not None
            mask = embedding[self.config.mask_token_id]
        rows = mask.to(embedding.dtype).expand(len(anchors), block, size).clone()
        rows[:, 0] = F.embedding(anchors, embedding)
        return rows.view(-1, size) * self.config.embedding_scale

    def forward(self, noise: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [rows, H] of the slots; row j of a block predicts the token AT its position (no shift).

        Args:
            noise: [rows, H], the slots' input embeddings (`noise`).
            positions: int [rows].
            attend: attention over context and block.
        """
        cos, sin = self.rotary(positions)
        h = noise
        for layer in self.layers:
            h = layer(h, cos, sin, attend)
        out: Tensor = self.norm(h)
        return out

    def adjust_logits(self, logits: Tensor) -> Tensor:
        """The target head's logits of drafter rows -> the drafter's own: multiplier, then soft-cap."""
        logits = logits * self.config.output_multiplier if self.config.output_multiplier != 1.0 else logits
        cap = self.config.final_logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)
