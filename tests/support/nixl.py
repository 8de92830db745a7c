"""NIXL, by which the halves of a pair hand K/V over: its wheels, unpacked, which need no GPU."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest

from .pinned_wheels import PinnedWheel, kept

NIXL = (
    PinnedWheel("nixl", "1.5.2", "e4ef5e16f60be11622030e23333387bd73101102fc9f62efa1c99021d51550a6"),
    PinnedWheel(
        "nixl-cu12",
        "1.5.1",
        "341d0dfa499f941c054614252f1d8047d1380e33f29c87707372ff5ec7d3779a",
        "manylinux_2_28_x86_64",
    ),
)
MACHINE, PYTHON = ("linux", "x86_64"), (3, 11)  # of the second wheel
NOT_WANTED = "nixl_ep"  # kernels for GPUs, most of that wheel


def nixl_folders() -> tuple[str, ...]:
    """Folders for PYTHONPATH that have NIXL, fetched (69 MB) if they are not there; else the test is skipped."""
    if (sys.platform, os.uname().machine) != MACHINE or sys.version_info[:2] != PYTHON:
        pytest.skip("the wheel of NIXL is for Linux on x86-64 and Python 3.11")
    return tuple(str(kept(f"{wheel.package}-{wheel.version}", wheel, _unpack)) for wheel in NIXL)


def _unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder, [name for name in opened.namelist() if not name.startswith(NOT_WANTED)])
