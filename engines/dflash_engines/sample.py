"""Features of one answer of the target, blocks at several places of it, and what the core's drafter makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_serve.models.attention import RaggedAttention
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.kv_cache import KVCache, Span, span_positions

SAMPLE = "sample.safetensors"


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
