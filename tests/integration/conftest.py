from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.support.embedded import tiny_engine
from tests.support.serving import Running, running


@pytest.fixture(scope="session")
def tiny_folders(pair: tuple[Path, Path]) -> tuple[Path, Path]:
    return pair


@pytest.fixture(scope="module")
def client(served: Running) -> Iterator[OpenAI]:
    """The official client."""
    with OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def served(tiny_folders: tuple[Path, Path]) -> Iterator[Running]:
    """One server for all tests that leave it as they found it."""
    with running(tiny_engine(tiny_folders, max_batch_size=4)) as server:
        yield server
