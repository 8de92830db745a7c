from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target and its drafter, which no test may change."""
    from tests.support.tiny_target import write_tiny_pair  # not every environment has torch

    return write_tiny_pair(tmp_path_factory.mktemp("pair"))
