"""What the numbers were measured on: hardware, versions, commit, date. Nothing of whose machine it was."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dflash_serve.drafter.config import Frozen

PACKAGES = ("dflash-serve", "aiperf", "torch", "transformers", "sglang", "tensorrt-llm", "vllm")
GEMM_FLAGS = ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512f", "avx2")
"""What decides how fast a CPU multiplies matrices."""


class Environment(Frozen):
    """Of the machine that runs the bench; servers elsewhere are described by the user, or unknown."""

    hardware: str | None
    python: str
    versions: dict[str, str]
    omp_wait_policy: str | None
    commit: str | None
    date: str
    """UTC."""


def environment(hardware: str | None, *, local: bool) -> Environment:
    """This environment.

    Args:
        hardware: what the user says the servers run on.
        local: they run here, so it can be looked up.
    """
    return Environment(
        hardware=hardware or (local_hardware() if local else None),
        python=platform.python_version(),
        versions={package: found for package in PACKAGES if (found := _version(package))},
        omp_wait_policy=os.environ.get("OMP_WAIT_POLICY"),
        commit=commit(),
        date=now(),
    )


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit() -> str | None:
    """Of this source tree, with `-dirty` where files differ from it; None outside of one."""
    found = _said("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12")
    return found or None


def local_hardware() -> str:
    """The GPUs, or the processor."""
    gpus = [line.strip() for line in _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()]
    if gpus:
        return f"{len(gpus)} x {gpus[0]}"
    fields: dict[str, str] = {}
    if Path("/proc/cpuinfo").exists():
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    flags = [flag for flag in GEMM_FLAGS if flag in fields.get("flags", "").split()]
    model = fields.get("model name") or platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores of {model}" + (f" ({', '.join(flags)})" if flags else "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _said(*command: str) -> str:
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - fixed words
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()
