from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target and its drafter, which no test may change."""
    from tests.support.tiny_target import write_tiny_pair  # not every environment has torch

    return write_tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models lose more time by sharing their work among threads than by doing it."""
    import torch  # not every environment has it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
