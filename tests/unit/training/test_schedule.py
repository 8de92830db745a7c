"""What a step trains on is a function of seed and step alone."""

from __future__ import annotations

import pytest

from dflash_serve.training.blocks import draw_anchors, step_sequences
from dflash_serve.training.recipe import TrainingSection
from dflash_serve.training.trainer import learning_rate


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
