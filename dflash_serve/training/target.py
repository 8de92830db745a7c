"""What training needs to see of a target and its tokenizer; the core knows no backend.

The walk over the layers is ours, so that each use brings the attention that suits it: padded slots for decoding answers
(`decoding`), packed whole sequences for context features (`target_features`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_serve.checkpoint.config import AttentionKind, RopeConfig
from dflash_serve.models.attention import Attend
from dflash_serve.models.attention.sdpa import block_mask
from dflash_serve.models.kv_cache import KVCache


class TargetShape(Protocol):
    """Sizes of a target; `layers` has one attention kind per decoder layer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def layers(self) -> tuple[AttentionKind, ...]: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def rope(self) -> RopeConfig: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class Target(Protocol):
    """A frozen causal LM over flat rows; each of `layers` is called as layer(h, cos, sin, attend) -> h.

    `get_parameter` must know `norm.weight` and `head.weight` until `pack` is called.
    """

    @property
    def embedding(self) -> Tensor: ...
    @property
    def layers(self) -> Sequence[Callable[..., Any]]: ...
    @property
    def norm(self) -> Callable[..., Any]: ...
    @property
    def rotary(self) -> Callable[..., Any]: ...
    @property
    def config(self) -> TargetShape: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
    def new_cache(self, slots: int, capacity: int) -> KVCache: ...
    def pack(self) -> None: ...
    def layer_weights(self, index: int) -> dict[str, Tensor]: ...
    def get_parameter(self, name: str) -> nn.Parameter: ...


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that we use."""

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


def run_layers(
    target: Target,
    token_ids: Tensor,
    positions: Tensor,
    attend: Attend,
    target_layer_ids: Sequence[int] = (),
    *,
    last: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Embedding and layers over flat rows, attention by the caller.

    Args:
        token_ids, positions: int64 [rows].
        target_layer_ids: 0-based layers whose outputs become the features.
        last: run to the end; False stops after the deepest feature layer, whose output is then the hidden state.

    Returns:
        (hidden [rows, H] before the final norm, features [rows, F*H] in the order of the ids, or None).
    """
    cos, sin = target.rotary(positions)
    h, taken = F.embedding(token_ids, target.embedding), {}
    end = len(target.layers) if last else max(target_layer_ids) + 1
    for index in range(end):
        h = target.layers[index](h, cos, sin, attend)
        if index in target_layer_ids:
            taken[index] = h
    features = torch.cat([taken[index] for index in target_layer_ids], dim=-1) if target_layer_ids else None
    return h, features


class PackedCausalAttention:
    """Attention of whole sequences packed after one another; keeps no K/V. Satisfies `drafter.model.Attend`."""

    def __init__(self, lengths: Sequence[int], kinds: Sequence[AttentionKind], device: torch.device) -> None:
        self.lengths, self.kinds = list(lengths), kinds
        longest = torch.arange(max(lengths), device=device)
        windowed = {kind for kind in kinds if kind.window is not None}
        self.masks = {kind: block_mask(longest, longest, kind) for kind in windowed}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = self.masks.get(self.kinds[layer])
        packed = zip(q.split(self.lengths), k.split(self.lengths), v.split(self.lengths), strict=True)
        return torch.cat([_causal(*sequence, mask) for sequence in packed])


def _causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention of one sequence, all [rows, heads or kv_heads, head_dim]; the mask narrows it to a window."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    seen = None if mask is None else mask[: q.shape[2], : q.shape[2]]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=True)
    return out[0].transpose(0, 1)


@torch.no_grad()
def target_features(target: Target, sequences: Sequence[Tensor], target_layer_ids: Sequence[int]) -> list[Tensor]:
    """Context features of whole sequences, computed online in the target's dtype.

    Args:
        sequences: token ids int64 [length] each, on the target's device.

    Returns:
        one [length, F*H] a sequence.
    """
    lengths, device = [len(s) for s in sequences], target.embedding.device
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    attention = PackedCausalAttention(lengths, target.config.layers, device)
    _, features = run_layers(target, torch.cat(list(sequences)), positions, attention, target_layer_ids, last=False)
    assert features is not None
    return list(features.split(lengths))
