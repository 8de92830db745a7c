"""The runner executes what was built and nothing else; without a GPU it says so in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_engines.rtx import compare_engine
from dflash_serve.errors import UserError
from tests.support.built import flip_last_byte, seal


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_it_refuses_without_a_gpu() -> None:
    with pytest.raises(UserError) as refused:
        compare_engine(Path("block.sm120.engine"), Path("drafter"), Path("sample"))
    assert str(refused.value) == "run: no GPU here: an engine for SM120 runs on one; copy it to such a machine"


def test_it_runs_no_engine_that_was_changed(tmp_path: Path) -> None:
    engine = tmp_path / "block.sm120.engine"
    engine.write_bytes(b"compiled")
    seal(tmp_path)
    flip_last_byte(engine)
    with pytest.raises(UserError, match="sha256 differs"):
        compare_engine(engine, Path("drafter"), Path("sample"))
