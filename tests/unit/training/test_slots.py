"""What training predicts of a slot is what decoding drafts there, whatever heads the drafter has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_serve.models.attention import RaggedAttention
from dflash_serve.models.drafter import Drafter, propose_by_walk
from dflash_serve.models.kv_cache import KVCache, Span
from dflash_serve.models.loader import load_target
from dflash_serve.training.blocks import Blocks, Labels, SlotForward, Teacher, lay_out
from dflash_serve.training.loss import SlotLoss, Weighting
from dflash_serve.training.trainer import target_features
from tests.support.heads import HEADS
from tests.support.tiny import random_tensors, tiny_drafter_config

CONTEXT = 9
TRAINED = {name: heads for name, heads in HEADS.items() if not {"selector", "draft_vocabulary"} & heads.keys()}


def random_drafter(heads: Mapping[str, object]) -> Drafter:
    drafter = Drafter(tiny_drafter_config(block_size=5, **heads))
    drafter.load_state_dict(random_tensors(drafter.config))
    return drafter


def random_features(drafter: Drafter) -> tuple[Tensor, Tensor, Tensor]:
    """Features of a sequence, the target's embedding and its head."""
    generator, config = torch.Generator().manual_seed(3), drafter.config
    features = torch.randn(CONTEXT + 8, config.feature_size, generator=generator)
    embedding, head = (torch.randn(config.vocab_size, config.hidden_size, generator=generator) for _ in "eh")
    return features, embedding, head


@torch.no_grad()
def drafted(drafter: Drafter, anchor: int) -> list[int]:
    """A block as decoding drafts it behind CONTEXT tokens."""
    config, (features, embedding, head) = drafter.config, random_features(drafter)
    cache = KVCache(
        layers=config.num_layers, entries=1, kv_heads=config.num_key_value_heads, capacity=64, head_dim=config.head_dim
    )
    context = drafter.context_kv(drafter.project_context(features[:CONTEXT]), torch.arange(CONTEXT))
    cache.write_all([Span(0, 0, CONTEXT)], *context)
    rows = config.rows()
    attention = RaggedAttention(cache, [Span(0, CONTEXT, rows)], config.layers, config.num_attention_heads)
    noise = drafter.noise(torch.tensor([anchor]), embedding)
    hidden = drafter(noise, torch.arange(CONTEXT, CONTEXT + rows), attention)[drafter.first_row :]
    (draft,) = propose_by_walk(drafter, lambda x: x @ head.t(), hidden, [anchor], [len(hidden)], [None])
    return draft


def hits(drafter: Drafter, anchor: int, tokens: list[int]) -> list[bool]:
    """Which slots training calls right where the answer goes on with these tokens."""
    features, embedding, head = random_features(drafter)
    sequence = torch.tensor([0] * CONTEXT + [anchor, *tokens])
    config = drafter.config
    blocks = lay_out([sequence], [torch.tensor([CONTEXT])], config.block_size, config.rows())
    predictions = SlotForward(drafter, embedding, dtype=torch.float32)(blocks, [features])
    labels = Labels(blocks.targets, blocks.valid)
    (hit,) = SlotLoss(head, Weighting()).scores(predictions, labels).hit.tolist()
    return list(hit)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("anchor", [5, 60])
def test_an_answer_that_follows_the_draft_is_all_hits(name: str, anchor: int) -> None:
    drafter = random_drafter(TRAINED[name])
    draft = drafted(drafter, anchor)
    assert hits(drafter, anchor, draft) == [True] * 4
    for slot in range(4):  # another token there is no hit, and those before it do not care
        other = [*draft[:slot], (draft[slot] + 1) % 96, *draft[slot + 1 :]]
        found = hits(drafter, anchor, other)
        assert found[: slot + 1] == [True] * slot + [False]


def test_each_head_gets_a_gradient_and_so_does_the_backbone() -> None:
    drafter = random_drafter({"markov": {"kind": "gated", "rank": 6}, "confidence": {"with_markov": True}})
    features, embedding, head = random_features(drafter)
    blocks = lay_out([torch.arange(CONTEXT + 8)], [torch.tensor([3, CONTEXT])], 5)
    predictions = SlotForward(drafter, embedding, dtype=torch.float32)(blocks, [features])
    loss, _ = SlotLoss(head, Weighting())(predictions, Labels(blocks.targets, blocks.valid))
    assert predictions.confidence is not None
    (loss + predictions.confidence.square().sum()).backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()), name


def test_the_teacher_gives_the_targets_own_distribution_of_every_slot(tiny_target_folder: Path) -> None:
    target = load_target(str(tiny_target_folder))
    config = tiny_drafter_config(target_layer_ids=(0, 2), num_target_layers=4, vocab_size=target.config.vocab_size)
    teacher = Teacher(target, config, soft=True)
    tokens = torch.randint(0, target.config.vocab_size, (12,), generator=torch.Generator().manual_seed(0))
    blocks: Blocks = lay_out([tokens], [torch.tensor([4, 9])], config.block_size)
    features, labels = teacher(blocks, target_features(target, [tokens], teacher.layer_ids))
    plain = target_features(target, [tokens], config.target_layer_ids)
    assert torch.equal(features[0], plain[0])
    assert labels.teacher is not None
    last = target.norm(target_features(target, [tokens], (3,))[0])
    assert torch.equal(labels.teacher[0], last[4:7])  # the row at the anchor tells of the token behind it
    assert torch.equal(labels.teacher[1, :2], last[9:11])
    assert Teacher(target, config, soft=False)(blocks, plain)[1].teacher is None
