"""A training pass computes, for every block at once, what decoding computes block by block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig
from dflash_serve.models.attention import RaggedAttention
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.kv_cache import KVCache, Span
from dflash_serve.training.blocks import SlotForward, lay_out
from tests.support.tiny import tiny_drafter_config

KINDS = {
    "full": AttentionKind(),
    "sliding": AttentionKind(window=6, causal=True),
    "sliding both ways": AttentionKind(window=6),
    "causal": AttentionKind(causal=True),
}
LENGTHS, ANCHORS = (12, 17), ([3, 7, 10], [5, 6, 15])


def random_drafter(kind: AttentionKind) -> Drafter:
    config = tiny_drafter_config(layers=(kind, kind))
    torch.manual_seed(0)
    drafter = Drafter(config)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return drafter


def inputs(config: DrafterConfig) -> tuple[list[Tensor], list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(config.vocab_size, (n,), generator=generator) for n in LENGTHS]
    features = [torch.randn(n, config.feature_size, generator=generator) for n in LENGTHS]
    return sequences, features, torch.randn(config.vocab_size, config.hidden_size, generator=generator)


def decoded(drafter: Drafter, tokens: Tensor, features: Tensor, anchor: int, embedding: Tensor) -> Tensor:
    """One block as decoding drafts it: context K/V in a cache, then the block."""
    config = drafter.config
    cache = KVCache(
        layers=config.num_layers, entries=1, kv_heads=config.num_key_value_heads, capacity=64, head_dim=config.head_dim
    )
    context = drafter.context_kv(drafter.project_context(features[:anchor]), torch.arange(anchor))
    cache.write_all([Span(0, 0, anchor)], *context)
    spans = [Span(0, anchor, config.block_size)]
    attention = RaggedAttention(cache, spans, config.layers, config.num_attention_heads)
    positions = torch.arange(anchor, anchor + config.block_size)
    hidden: Tensor = drafter(drafter.noise(tokens[anchor : anchor + 1], embedding), positions, attention)
    return hidden[1:]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_all_blocks_at_once_are_the_blocks_of_decoding(kind: AttentionKind) -> None:
    """Through FlexAttention, too, which a GPU uses."""
    drafter = random_drafter(kind)
    sequences, features, embedding = inputs(drafter.config)
    blocks = lay_out(sequences, [torch.tensor(a) for a in ANCHORS], drafter.config.block_size)
    forward = SlotForward(drafter, embedding, dtype=torch.float32)
    with torch.no_grad():
        alone = [
            decoded(drafter, tokens, rows, anchor, embedding)
            for tokens, rows, anchors in zip(sequences, features, ANCHORS, strict=True)
            for anchor in anchors
        ]
        for flex in (None, flex_attention):
            forward.backbone.flex = flex
            torch.testing.assert_close(forward(blocks, features).hidden, torch.stack(alone), atol=2e-5, rtol=1e-4)


def test_targets_are_the_tokens_at_the_slots_and_stop_at_the_end() -> None:
    tokens = torch.arange(100, 110)
    blocks = lay_out([tokens], [torch.tensor([2, 7])], block_size=4)
    assert blocks.targets[0].tolist() == [103, 104, 105]
    assert blocks.valid.tolist() == [[True] * 3, [True, True, False]]
    assert blocks.contexts == (32,)
