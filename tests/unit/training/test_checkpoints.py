"""A checkpoint is whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dflash_serve.common.store import ResultFolders, digest
from dflash_serve.errors import UserError
from dflash_serve.training.trainer import CHECKPOINT, Progress, load_state, save_state

MADE_BY = {"training": {"lr": 1e-3}}


def save(folder: Path, step: int) -> Path:
    groups = {"drafter": {"w": torch.full((2, 3), float(step))}, "optimizer": {"0.1.step": torch.tensor(float(step))}}
    save_state(ResultFolders(folder), Progress(made_by=MADE_BY, step=step, seconds=1.5), groups)
    return ResultFolders(folder).path(CHECKPOINT, digest(MADE_BY))


def loaded(folder: Path) -> Progress:
    state = load_state(ResultFolders(folder), MADE_BY)
    assert state is not None
    assert state[1]["drafter"]["w"].tolist() == [[float(state[0].step)] * 3] * 2
    return state[0]


def test_state_survives_the_disk(tmp_path: Path) -> None:
    assert load_state(ResultFolders(tmp_path), MADE_BY) is None
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    assert (loaded(tmp_path).step, loaded(tmp_path).seconds) == (2, 1.5)
    assert list(tmp_path.iterdir()) == [path]


def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    os.replace(path, path.with_name(f".{path.name}.old"))
    assert loaded(tmp_path).step == 7


def test_what_a_killed_save_left_is_cleared_away(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    scratch = path.with_name(f".{path.name}.12345678")
    scratch.mkdir()
    (scratch / "drafter.safetensors").write_bytes(b"half")
    save(tmp_path, 8)
    assert loaded(tmp_path).step == 8
    assert list(tmp_path.iterdir()) == [path]


def test_a_broken_checkpoint_is_refused(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "drafter.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match="cannot be read"):
        loaded(tmp_path)
