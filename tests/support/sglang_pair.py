"""A prefill half and a decode half of SGLang on a CPU, with K/V over NIXL."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.deployment.description import Deployment
from dflash_sglang.settings import BACKUP, TRANSFER

from .pinned_wheels import PinnedWheel, kept
from .sglang_server import FORKED, OnCpu

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
BOOTSTRAP = "disaggregation-bootstrap-port"


def nixl_folders() -> tuple[Path, ...]:
    """Folders for PYTHONPATH that have NIXL, fetched (69 MB) if they are not there; else the test is skipped."""
    if (sys.platform, os.uname().machine) != MACHINE or sys.version_info[:2] != PYTHON:
        pytest.skip("the wheel of NIXL is for Linux on x86-64 and Python 3.11")
    return tuple(kept(f"{wheel.package}-{wheel.version}", wheel, _unpack) for wheel in NIXL)


def _unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder, [name for name in opened.namelist() if not name.startswith(NOT_WANTED)])


def half(
    deployment: Deployment, role: str, bootstrap_port: int, port: int | None = None, **env: str
) -> tuple[Deployment, OnCpu]:
    """A server for `fleet`: the deployment as one half, which keeps no host memory for retracted requests.

    Args:
        port: of its HTTP server; None = a free one.
        env: more variables of its environment.
    """
    given: dict[str, Any] = {TRANSFER: "nixl", BOOTSTRAP: bootstrap_port}
    if role == "decode":
        given[BACKUP] = "cpu_tensor"  # else it wants 10 GiB of free host memory
    described = deployment.model_dump(exclude_unset=True)
    described |= {"role": role, "engine_args": {"sglang": given}}
    path = os.pathsep.join([*map(str, nixl_folders()), os.environ.get("PYTHONPATH", "")])
    return Deployment.model_validate(described), OnCpu(env={**FORKED, "PYTHONPATH": path, **env}, port=port)
