"""A checkpoint is whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflash_serve.common.store import ResultFolders

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
