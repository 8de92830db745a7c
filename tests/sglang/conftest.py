"""These run in the environment that `make test-sglang` builds; elsewhere they are not collected."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from importlib.util import find_spec

import pytest

from tests.support.sglang_server import OnCpu, Server, fleet, smollm2

HAVE_SERVER = find_spec("sglang") is not None and find_spec("sglang_cpu_platform") is not None
collect_ignore_glob = [] if HAVE_SERVER else ["test_*.py"]
FLAT_THEN_STEEP = {"target": {1: 1.0, 8: 1.0, 256: 32.0}, "draft": {1: 0.05, 16: 0.05}}
"""Costs of a machine on which 8 rows cost no more than one, and every further row costs in full."""


@pytest.fixture(scope="session")
def smollm2_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Future[Server]]]:
    """SmolLM2 without speculation (`plain`), in whole blocks (`DFLASH`), and as wide as it pays (`automatic`)."""
    folder = tmp_path_factory.mktemp("smollm2")
    table = folder / "cost.json"
    table.write_text(json.dumps(FLAT_THEN_STEEP))
    wanted = {
        "plain": (smollm2("off"), OnCpu()),
        "DFLASH": (smollm2(8), OnCpu()),
        "automatic": (smollm2("auto"), OnCpu(env={"DFLASH_SERVE_COST_TABLE": str(table)})),
    }
    with fleet(folder, wanted) as servers:
        yield servers
