"""Every fault in `upstream/` is in the pinned release, and its patch mends it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.pinned_wheels import unpacked
from tests.support.sglang_router import MACHINE, SGLANG, WHEELS
from tests.support.upstream import FAULTS, Fault, patched, site_packages

PYTHON = {"sglang": os.environ["SGLANG_PYTHON"], "vllm": os.environ["VLLM_PYTHON"], "router": sys.executable}
PATCHED = [fault for fault in FAULTS if fault.patch]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_pinned_release_has_the_fault(fault: Fault) -> None:
    path = None
    if fault.engine == "router":
        if (sys.platform, os.uname().machine) != MACHINE:
            pytest.skip("the router's wheel is for Linux on x86-64")
        path = unpacked(WHEELS[SGLANG])
    assert fault.is_there(PYTHON[fault.engine], path)


@pytest.mark.parametrize("fault", PATCHED, ids=str)
def test_the_patch_mends_it(fault: Fault, tmp_path: Path) -> None:
    python = PYTHON[fault.engine]
    assert not fault.is_there(python, patched(fault, site_packages(python), tmp_path))
