"""Real inputs for comparing drafters: features of one answer of the target, and blocks at several places of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_serve.models.attention.ragged import RaggedAttention
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.kv_cache import KVCache, Span, span_positions

from .graph import dense_mask

NAME = "sample.safetensors"


@dataclass(frozen=True)
class Sample:
    """Blocks and what lies before them."""

    features: Tensor
    """[tokens, F*H] of one answer."""
    noise: Tensor
    """[blocks, B, H]."""
    anchors: tuple[int, ...]
    """Position of each block's slot 0: so many context tokens it has."""

    def save(self, folder: Path) -> None:
        """Writes it into a step's folder."""
        save_file(
            {"features": self.features, "noise": self.noise, "anchors": torch.tensor(self.anchors)}, folder / NAME
        )

    @classmethod
    def load(cls, folder: Path) -> Sample:
        """What `save` wrote."""
        found = load_file(folder / NAME)
        return cls(found["features"], found["noise"], tuple(found["anchors"].tolist()))


@torch.inference_mode()
def by_core(drafter: Drafter, sample: Sample) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [blocks, B, H] of the core drafter, and the context's keys and values [tokens, layers, kv, dim]."""
    config, tokens = drafter.config, len(sample.features)
    dtype = drafter.fc.weight.dtype
    k, v = drafter.context_kv(drafter.project_context(sample.features.to(dtype)), torch.arange(tokens))
    store = KVCache(
        layers=config.num_layers, entries=len(sample.anchors), kv_heads=config.num_key_value_heads,
        capacity=tokens + config.block_size, head_dim=config.head_dim, dtype=dtype,
    )  # fmt: skip
    for slot, anchor in enumerate(sample.anchors):
        store.write_all([Span(slot, 0, anchor)], k[:anchor], v[:anchor])
    spans = [Span(slot, anchor, config.block_size) for slot, anchor in enumerate(sample.anchors)]
    attend = RaggedAttention(store, spans, config.layers, config.num_attention_heads)
    hidden = drafter(sample.noise.flatten(0, 1).to(dtype), span_positions(spans), attend)
    return hidden.view(sample.noise.shape), k, v


def block_inputs(drafter: Drafter, sample: Sample, k: Tensor, v: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs of `graph.Block` for the sample, contexts padded to the longest."""
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
    """The inputs of `graph.Context` for the sample."""
    cos, sin = drafter.rotary(torch.arange(len(sample.features)))
    return {"features": sample.features.to(dtype), "cos": cos.to(dtype), "sin": sin.to(dtype)}
