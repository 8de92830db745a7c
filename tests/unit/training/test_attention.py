"""A training pass computes for every block at once what decoding computes block by block, whatever heads there are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dflash_serve.checkpoint.config import AttentionKind, DrafterConfig
from dflash_serve.models.attention import RaggedAttention
from dflash_serve.models.drafter import Drafter, propose
from dflash_serve.models.kv_cache import KVCache, Span
from dflash_serve.models.loader import load_target
from dflash_serve.training.blocks import Compiled, Flex, Labels, SlotForward, Teacher, compiled_flex, lay_out
from dflash_serve.training.loss import SlotLoss, Weighting
from dflash_serve.training.trainer import target_features
from tests.support.heads import HEADS
from tests.support.tiny import random_tensors, tiny_drafter_config

KINDS = {
    "full": AttentionKind(),
    "sliding": AttentionKind(window=6, causal=True),
    "sliding both ways": AttentionKind(window=6),
    "causal": AttentionKind(causal=True),
}
LENGTHS, ANCHORS = (12, 17), ([3, 7, 10], [5, 6, 15])
CONTEXT = 9
TRAINED = {name: heads for name, heads in HEADS.items() if not {"selector", "draft_vocabulary"} & heads.keys()}


def random_drafter(kind: AttentionKind) -> Drafter:
    drafter = Drafter(tiny_drafter_config(layers=(kind, kind)))
    torch.manual_seed(0)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return drafter


def headed_drafter(heads: Mapping[str, object]) -> Drafter:
    drafter = Drafter(tiny_drafter_config(block_size=5, **heads))
    drafter.load_state_dict(random_tensors(drafter.config))
    return drafter


def inputs(config: DrafterConfig) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Token ids and features of two sequences, and the target's embedding."""
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(config.vocab_size, (n,), generator=generator) for n in LENGTHS]
    features = [torch.randn(n, config.feature_size, generator=generator) for n in LENGTHS]
    return sequences, features, torch.randn(config.vocab_size, config.hidden_size, generator=generator)


@torch.no_grad()
def decoded(drafter: Drafter, token: int, features: Tensor, anchor: int, embedding: Tensor) -> Tensor:
    """Hidden states of the slots of one block as decoding drafts it: context K/V in a cache, then the block."""
    config = drafter.config
    cache = KVCache.of(config, 1, 64)
    context = drafter.context_kv(drafter.project_context(features[:anchor]), torch.arange(anchor))
    cache.write_all([Span(0, 0, anchor)], *context)
    rows = config.rows()
    attention = RaggedAttention(cache, [Span(0, anchor, rows)], config.layers, config.num_attention_heads)
    noise = drafter.noise(torch.tensor([token]), embedding)
    hidden: Tensor = drafter(noise, torch.arange(anchor, anchor + rows), attention)
    return hidden[config.first_row :]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_all_blocks_at_once_are_the_blocks_of_decoding(kind: AttentionKind) -> None:
    """Through FlexAttention, too, which a GPU uses, and with compiled masks."""
    drafter = random_drafter(kind)
    sequences, features, embedding = inputs(drafter.config)
    blocks = lay_out(sequences, [torch.tensor(a) for a in ANCHORS], drafter.config.block_size)
    forward = SlotForward(drafter, embedding, dtype=torch.float32)
    alone = [
        decoded(drafter, int(tokens[anchor]), rows, anchor, embedding)
        for tokens, rows, anchors in zip(sequences, features, ANCHORS, strict=True)
        for anchor in anchors
    ]
    compiled = Compiled(create_block_mask, wanted=True, backend="aot_eager")
    for flex in (None, Flex(flex_attention, create_block_mask), Flex(flex_attention, compiled)):
        forward.backbone.flex = flex
        with torch.no_grad():
            torch.testing.assert_close(forward(blocks, features).hidden, torch.stack(alone), atol=2e-5, rtol=1e-4)
    assert compiled.fast is not None


def test_where_flex_attention_cannot_be_compiled_it_is_left_out_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert compiled_flex(tiny_drafter_config(), torch.device("cpu"), torch.float32) is None  # it has no backward there
    (said,) = [record.getMessage() for record in caplog.records if record.name == Compiled.__module__]
    assert said.startswith("flex_attention is not compiled: ")


def test_targets_are_the_tokens_at_the_slots_and_stop_at_the_end() -> None:
    tokens = torch.arange(100, 110)
    blocks = lay_out([tokens], [torch.tensor([2, 7])], block_size=4)
    assert blocks.targets[0].tolist() == [103, 104, 105]
    assert blocks.valid.tolist() == [[True] * 3, [True, True, False]]
    assert blocks.contexts == (32,)


def hits(drafter: Drafter, anchor: int, tokens: list[int]) -> list[bool]:
    """The slots that training calls right where the answer goes on with these tokens."""
    _, (_, features), embedding = inputs(drafter.config)
    sequence, config = torch.tensor([0] * CONTEXT + [anchor, *tokens]), drafter.config
    blocks = lay_out([sequence], [torch.tensor([CONTEXT])], config.block_size, config.rows())
    predictions = SlotForward(drafter, embedding, dtype=torch.float32)(blocks, [features])
    (hit,) = SlotLoss(embedding, Weighting()).scores(predictions, Labels(blocks.targets, blocks.valid)).hit.tolist()
    return list(hit)


@pytest.mark.parametrize("name", TRAINED)
def test_an_answer_that_follows_the_draft_is_all_hits(name: str) -> None:
    """What training predicts of a slot is what decoding drafts there."""
    drafter, anchor = headed_drafter(TRAINED[name]), 60
    _, (_, features), embedding = inputs(drafter.config)
    hidden = decoded(drafter, anchor, features, CONTEXT, embedding)
    (draft,) = propose(drafter, lambda x: x @ embedding.t(), hidden, [anchor], [len(hidden)], [None])
    assert hits(drafter, anchor, draft) == [True] * 4
    for slot in range(4):  # another token there is no hit, and those before it do not care
        other = [*draft[:slot], (draft[slot] + 1) % 96, *draft[slot + 1 :]]
        assert hits(drafter, anchor, other)[: slot + 1] == [True] * slot + [False]


def test_each_head_gets_a_gradient_and_so_does_the_backbone() -> None:
    drafter = headed_drafter({"markov": {"kind": "gated", "rank": 6}, "confidence": {"with_markov": True}})
    sequences, features, embedding = inputs(drafter.config)
    blocks = lay_out(sequences[1:], [torch.tensor([3, CONTEXT])], 5)
    predictions = SlotForward(drafter, embedding, dtype=torch.float32)(blocks, features[1:])
    loss, _ = SlotLoss(embedding, Weighting())(predictions, Labels(blocks.targets, blocks.valid))
    assert predictions.confidence is not None
    (loss + predictions.confidence.square().sum()).backward()
    assert [name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_the_teacher_gives_the_targets_own_distribution_of_every_slot(tiny_target_folder: Path) -> None:
    target = load_target(str(tiny_target_folder))
    config = tiny_drafter_config(target_layer_ids=(0, 2), num_target_layers=4, vocab_size=target.config.vocab_size)
    teacher = Teacher(target, config, soft=True)
    tokens = torch.randint(0, target.config.vocab_size, (12,), generator=torch.Generator().manual_seed(0))
    blocks = lay_out([tokens], [torch.tensor([4, 9])], config.block_size)
    features, labels = teacher(blocks, target_features(target, [tokens], teacher.layer_ids))
    plain = target_features(target, [tokens], config.target_layer_ids)
    assert torch.equal(features[0], plain[0])
    assert labels.teacher is not None
    last = target.norm(target_features(target, [tokens], (3,))[0])
    assert torch.equal(labels.teacher[0], last[4:7])  # the row at the anchor tells of the token behind it
    assert torch.equal(labels.teacher[1, :2], last[9:11])
    assert Teacher(target, config, soft=False)(blocks, plain)[1].teacher is None
