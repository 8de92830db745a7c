"""The deployments whose dry-runs are written down, and the hub that their models come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.offline_hub import offline_hub

FOLDER = Path(__file__).parents[1] / "unit" / "cli" / "golden"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The published models, as far as files tell, until the module's tests are over."""
    with pytest.MonkeyPatch.context() as patch:
        offline_hub(tmp_path_factory.mktemp("hub"), patch)
        yield
