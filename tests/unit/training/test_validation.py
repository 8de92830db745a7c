"""Acceptance lengths without a real loop are those of a loop."""

from __future__ import annotations

import json
from unittest.mock import Mock

import pytest
import torch

from dflash_serve.training.blocks import lay_out
from dflash_serve.training.loss import SlotScores
from dflash_serve.training.trainer import Progress, Tally, Trainer, walk


def test_the_walk_goes_from_anchor_to_anchor() -> None:
    # From 0: two accepted, next anchor 3: none, next 4: one, next 6: does not fit.
    assert walk([2, 9, 9, 0, 1, 9, 3], [True] * 6 + [False]) == [3, 1, 2]


def test_a_perfect_drafter_accepts_whole_blocks() -> None:
    tokens = torch.arange(20)
    blocks = lay_out([tokens], [torch.arange(4, 19)], block_size=4)
    tally = Tally(4)
    hit = blocks.valid.clone()
    tally.add(blocks, SlotScores(torch.zeros(hit.shape), torch.ones(hit.shape), hit))
    scores = tally.scores()
    assert scores.slot_accuracy == (1.0, 1.0, 1.0)
    assert scores.simulated_tau == scores.replayed_tau == 4.0
    assert scores.survival == (1.0, 1.0, 1.0)


def test_survival_counts_accepted_slots_only() -> None:
    tokens = torch.arange(20)
    blocks = lay_out([tokens], [torch.arange(4, 19)], block_size=4)
    hit = blocks.valid.clone()
    hit[:, 0] = False
    tally = Tally(4)
    tally.add(blocks, SlotScores(torch.ones(hit.shape), torch.ones(hit.shape), hit))
    scores = tally.scores()
    assert scores.replayed_tau == 1.0
    assert scores.survival == (0.0, 0.0, 0.0)
    assert scores.slot_accuracy == pytest.approx((0.0, 1.0, 1.0))
    assert scores.loss == pytest.approx(1.0)


def test_where_no_answer_is_as_long_as_a_block_nothing_is_known_and_nothing_is_kept() -> None:
    tokens = torch.arange(6)
    blocks = lay_out([tokens], [torch.arange(3, 5)], block_size=8)
    tally = Tally(8)
    tally.add(blocks, SlotScores(torch.zeros(2, 7), torch.ones(2, 7), blocks.valid.clone()))
    scores = tally.scores()
    assert "replayed_tau" not in scores.as_json()
    json.loads(json.dumps(scores.as_json(), allow_nan=False))
    trainer = Mock(spec=Trainer, progress=Progress(made_by={}))
    Trainer.keep_best(trainer, 3, scores)
    assert trainer.progress.best is None
