"""Acceptance lengths without a real loop are those of a loop."""

from __future__ import annotations

import json
from unittest.mock import Mock

import pytest
import torch

from dflash_serve.training.blocks import Blocks, lay_out
from dflash_serve.training.loss import SlotScores
from dflash_serve.training.trainer import Progress, Scores, Trainer, walk


def test_the_walk_goes_from_anchor_to_anchor() -> None:
    # From 0: two accepted, next anchor 3: none, next 4: one, next 6: does not fit.
    assert walk([2, 9, 9, 0, 1, 9, 3], [True] * 6 + [False]) == [3, 1, 2]


def scored(blocks: Blocks, hit: torch.Tensor) -> Scores:
    ones = torch.ones(hit.shape)
    return Scores.of(blocks.valid, blocks.counts, SlotScores(ones, ones, hit))


@pytest.mark.parametrize(("first", "tau"), [(True, 4.0), (False, 1.0)])
def test_a_slot_counts_only_where_those_before_it_are_right(first: bool, tau: float) -> None:
    blocks = lay_out([torch.arange(20)], [torch.arange(4, 19)], block_size=4)
    hit = blocks.valid.clone()
    hit[:, 0] &= first
    scores = scored(blocks, hit)
    assert scores.simulated_tau == scores.replayed_tau == tau
    assert scores.survival == (float(first),) * 3
    assert scores.slot_accuracy == pytest.approx((float(first), 1.0, 1.0))
    assert scores.loss == pytest.approx(1.0)


def test_where_no_answer_is_as_long_as_a_block_nothing_is_known_and_nothing_is_kept() -> None:
    blocks = lay_out([torch.arange(6)], [torch.arange(3, 5)], block_size=8)
    scores = scored(blocks, blocks.valid)
    assert "replayed_tau" not in scores.as_json()
    json.loads(json.dumps(scores.as_json(), allow_nan=False))
    trainer = Mock(spec=Trainer, progress=Progress(made_by={}))
    Trainer.keep_best(trainer, 3, scores)
    assert trainer.progress.best is None
