"""A step is a function of seed and step, validation measures what a loop would, and a checkpoint is whole or absent."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from dflash_serve.common.store import ResultFolders
from dflash_serve.training.blocks import Blocks, draw_anchors, lay_out, step_sequences
from dflash_serve.training.loss import SlotScores
from dflash_serve.training.recipe import TrainingSection
from dflash_serve.training.trainer import Progress, Scores, Trainer, learning_rate, walk


def test_every_epoch_sees_every_sequence_once() -> None:
    visits = [visit for step in range(10) for visit in step_sequences(3, step, count=10, per_step=4)]
    for epoch in range(4):
        assert sorted(index for e, index in visits if e == epoch) == list(range(10))


def test_epochs_differ_and_repeat_with_the_seed() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [index for _, index in step_sequences(seed, epoch, count=50, per_step=50)]

    assert order(1, 0) == order(1, 0) != order(1, 1) != order(2, 1)


def test_anchors_are_answer_positions_with_something_behind_them() -> None:
    anchors = draw_anchors(0, 0, 0, first=5, length=12, count=100)
    assert anchors.tolist() == list(range(5, 11))


def test_anchors_are_drawn_anew_every_epoch_and_only_then() -> None:
    first, again, later = (draw_anchors(7, epoch, 2, first=10, length=200, count=8) for epoch in (0, 0, 1))
    assert first.tolist() == again.tolist() != later.tolist()
    assert first.tolist() == sorted(set(first.tolist()))


def test_the_learning_rate_warms_up_and_falls_to_its_end() -> None:
    settings = TrainingSection(steps=1, lr=1.0, warmup=0.1, final_lr=0.01)
    rates = [learning_rate(p, settings) for p in (0.0, 0.05, 0.1, 0.5, 1.0, 1.2)]
    assert rates == pytest.approx([0.01, 0.5, 1.0, 0.591, 0.01, 0.01], abs=1e-3)


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


KEY = "f" * 64


def save(folder: Path, step: int) -> Path:
    with ResultFolders(folder).put("checkpoint", KEY) as scratch:
        (scratch / "step").write_text(str(step))
    return ResultFolders(folder).path("checkpoint", KEY)


@pytest.mark.parametrize("killed", ["nowhere", "between two renames", "while it wrote"])
def test_a_kill_at_any_moment_leaves_the_newest_whole_one_and_the_next_save_clears_up(
    tmp_path: Path, killed: str
) -> None:
    path = save(tmp_path, 7)
    if killed == "between two renames":
        os.replace(path, path.with_name(f".{path.name}.old"))
    elif killed == "while it wrote":
        path.with_name(f".{path.name}.12345678").mkdir()
    found = ResultFolders(tmp_path).get("checkpoint", KEY)
    assert found is not None
    assert (found / "step").read_text() == "7"
    assert (save(tmp_path, 8) / "step").read_text() == "8"
    assert list(tmp_path.iterdir()) == [path]
