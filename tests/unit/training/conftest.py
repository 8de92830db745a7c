"""A tiny random target with its tokenizer, shared by the training tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_target import write_tiny_target


@pytest.fixture(scope="session")
def tiny_target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("tiny") / "target")
