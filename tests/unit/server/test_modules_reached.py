from __future__ import annotations

from pathlib import Path

from tests.support.modules_reached import modules_reached
from tests.support.tiny_target import write_tiny_pair

# To be lowered only: a request runs code of 30 modules, or of 31 with plain operators.
MOST = 31


def test_a_request_runs_through_few_modules(tmp_path: Path) -> None:
    reached = modules_reached(*write_tiny_pair(tmp_path / "pair"), tmp_path)
    print(f"loaded: {len(reached.loaded)}, run by the request: {len(reached.called)}")
    assert len(reached.called) <= MOST, "\n".join(reached.called)
