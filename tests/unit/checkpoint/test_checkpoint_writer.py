"""A checkpoint is written completely or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from dflash_serve.checkpoint import writer as checkpoint_writer
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.errors import UserError
from dflash_serve.models.loader import load_drafter
from tests.support.tiny import random_tensors, tiny_drafter_config, write_tiny_drafter

CONFIG = tiny_drafter_config()


def write(folder: Path, *, overwrite: bool = False) -> None:
    write_drafter(folder, CONFIG, random_tensors(CONFIG), overwrite=overwrite)


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write(tmp_path / "a")
    assert load_drafter(tmp_path / "a").config == CONFIG
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_full_folder_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty; give another, or --overwrite"):
        write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def test_overwrite_replaces_a_checkpoint_wholly(tmp_path: Path) -> None:
    folder = write_tiny_drafter(tmp_path / "a", tiny_drafter_config(block_size=8))
    (folder / "stale.json").write_text("{}")
    write(folder, overwrite=True)
    assert load_drafter(folder).config == CONFIG
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_overwrite_never_replaces_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="no checkpoint"):
        write(tmp_path, overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        write(tmp_path / "a", overwrite=True)


@pytest.mark.parametrize("exists", [False, True])
def test_a_failure_leaves_everything_as_it_was(exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a"
    if exists:
        write_tiny_drafter(folder, tiny_drafter_config(block_size=8))

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(checkpoint_writer, "_write_tensors", fail)
    with pytest.raises(UserError, match="disk full"):
        write(folder, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == (["a"] if exists else [])
    assert not exists or load_drafter(folder).config.block_size == 8


def test_tensors_of_another_drafter_are_not_written(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    del tensors["norm.weight"]
    with pytest.raises(ValueError, match=r"norm\.weight"):
        write_drafter(tmp_path / "a", CONFIG, tensors)
    assert not list(tmp_path.iterdir())
