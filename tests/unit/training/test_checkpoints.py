"""A checkpoint is whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dflash_serve.errors import UserError
from dflash_serve.training.trainer import CURRENT, Progress, load_state, save_state


def test_state_survives_the_disk(tmp_path: Path) -> None:
    assert load_state(tmp_path) is None
    for step in (1, 2):
        groups = {
            "drafter": {"w": torch.full((2, 3), float(step))},
            "optimizer": {"0.1.step": torch.tensor(float(step))},
        }
        save_state(tmp_path, Progress(recipe_sha256="x", step=step, seconds=1.5), groups)
    state = load_state(tmp_path)
    assert state is not None
    progress, groups = state
    assert (progress.step, progress.seconds) == (2, 1.5)
    assert groups["drafter"]["w"].tolist() == [[2.0] * 3] * 2
    assert [path.name for path in tmp_path.iterdir()] == [CURRENT]


def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    save_state(tmp_path, Progress(recipe_sha256="x", step=7), {"drafter": {"w": torch.ones(1)}})
    os.replace(tmp_path / CURRENT, tmp_path / f".{CURRENT}.old")
    state = load_state(tmp_path)
    assert state is not None
    assert state[0].step == 7


def test_what_a_killed_save_left_is_cleared_away(tmp_path: Path) -> None:
    save_state(tmp_path, Progress(recipe_sha256="x", step=7), {"drafter": {"w": torch.ones(1)}})
    (tmp_path / f".{CURRENT}.12345678").mkdir()
    (tmp_path / f".{CURRENT}.12345678" / "drafter.safetensors").write_bytes(b"half")
    save_state(tmp_path, Progress(recipe_sha256="x", step=8), {"drafter": {"w": torch.ones(1)}})
    state = load_state(tmp_path)
    assert state is not None
    assert state[0].step == 8
    assert [path.name for path in tmp_path.iterdir()] == [CURRENT]


def test_a_broken_checkpoint_is_refused(tmp_path: Path) -> None:
    save_state(tmp_path, Progress(recipe_sha256="x"), {"drafter": {"w": torch.ones(1)}})
    (tmp_path / CURRENT / "drafter.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match="cannot be read"):
        load_state(tmp_path)
