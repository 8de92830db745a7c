"""Without a GPU the runner says so in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_engines.runner import compare_engine
from dflash_serve.errors import UserError


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_it_refuses_without_a_gpu() -> None:
    with pytest.raises(UserError) as refused:
        compare_engine(Path("block.sm120.engine"), Path("drafter"), Path("sample"))
    assert str(refused.value) == "run: no GPU here: an engine for SM120 runs on one; copy it to such a machine"
