"""What a number was measured on: hardware, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def describe() -> dict[str, str | int]:
    """Processor or GPU, cores, threads, waiting policy, Python and commit."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "python": platform.python_version(),
        "commit": _commit(),
    }


def versions(*packages: str) -> dict[str, str | None]:
    """Installed versions; None = not installed."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _processor() -> str:
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return platform.processor() or platform.machine()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    wanted = ("amx_bf16", "avx512f", "avx512_vnni", "avx512_bf16")  # what decides how fast a GEMM is
    flags = [flag for flag in wanted if flag in fields.get("flags", "").split()]
    return f"{fields.get('model name', platform.machine())} ({', '.join(flags)})"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"
