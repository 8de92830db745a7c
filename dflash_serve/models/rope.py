"""Rotary position embedding, shared by drafter and target. The scaling formulas are transformers' own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dflash_serve.checkpoint.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_position_embeddings: int) -> tuple[Tensor, float]:
    """The inverse frequencies [head_dim/2] in fp32, and the factor on cos and sin (1 but for YaRN and longrope)."""
    if rope.scaling is None:
        return rope.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim), 1.0
    # Imported here: transformers costs seconds, and plain RoPE does not need it.
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = rope.model_dump(mode="json", exclude={"theta", "scaling"}, exclude_none=True)
    config = PretrainedConfig(
        rope_parameters={"rope_type": rope.scaling, "rope_theta": rope.theta, **known},
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=max_position_embeddings,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope.scaling](config, torch.device("cpu"))
    return frequencies.float(), float(factor)


class RotaryEmbedding(nn.Module):
    """Positions [rows] -> (cos, sin), each [rows, 1, head_dim] in fp32 (bf16 positions beyond 256 would collide).

    `sin` carries the sign of the half-split rotation, so that `rotate` is one roll and one fused multiply-add: on CPU a
    decoding step is made of tiny operations, and each one saved in every layer counts.
    """

    inverse_frequency: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, max_position_embeddings: int) -> None:
        super().__init__()
        with torch.device("cpu"):  # even when the weights are built on the meta device
            frequencies, self.factor = inverse_frequencies(rope, head_dim, max_position_embeddings)
        self.register_buffer("inverse_frequency", frequencies, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = (positions[:, None].float() * self.inverse_frequency)[:, None]
        cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [rows, heads, head_dim]: halves (a, b) -> (a cos - b sin, b cos + a sin), as Llama and Qwen do."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)
