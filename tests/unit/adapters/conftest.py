"""A target and a drafter on paper that every engine serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.paper_models import write_paper_drafter, write_paper_target


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    target, drafter = write_paper_target(tmp_path / "target"), write_paper_drafter(tmp_path / "drafter")
    return {"target": {"model": str(target)}, "drafter": {"model": str(drafter)}, "hardware": {"gpu": "h200"}}
