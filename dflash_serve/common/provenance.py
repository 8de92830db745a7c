"""Provenance of a result: hardware, versions, commit, date; nothing that identifies the machine's owner. No torch."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel

PACKAGES = ("dflash-serve", "aiperf", "torch", "transformers", "safetensors", "sglang", "tensorrt-llm", "vllm")
GEMM_FLAGS = ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512f", "avx2")
"""CPU flags that decide the speed of matrix products."""


class Environment(BaseModel, frozen=True, extra="forbid"):
    """Hardware and software of one run; None = unknown."""

    hardware: str | None  # The machine that did the work; for servers elsewhere, the user's description
    python: str
    versions: dict[str, str]
    omp_wait_policy: str | None
    commit: str | None
    date: str  # UTC


def environment(hardware: str | None = None, *, local: bool = True) -> Environment:
    """The environment of this process.

    Args:
        hardware: the user's description of the servers' hardware.
        local: the servers run on this machine, so the hardware can be read.
    """
    return Environment(
        hardware=hardware or (local_hardware() if local else None),
        python=platform.python_version(),
        versions=versions(),
        omp_wait_policy=os.environ.get("OMP_WAIT_POLICY"),
        commit=commit(),
        date=now(),
    )


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions(*packages: str) -> dict[str, str]:
    """Package -> installed version, of `PACKAGES` or the given ones; packages that are not installed are left out."""
    found = {}
    for package in packages or PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of this source tree, with `-dirty` if files differ from it; None outside a checkout."""
    here = str(Path(__file__).parent)
    return _output("git", "-C", here, "describe", "--always", "--dirty", "--abbrev=12") or None


def local_hardware() -> str:
    """Number and name of the GPUs, or of the processor's cores."""
    gpus = query_gpus("name")
    return f"{len(gpus)} x {gpus[0]}" if gpus else f"{os.cpu_count()} cores of {processor()}"


def query_gpus(field: str) -> list[str]:
    """A field of nvidia-smi for each GPU, without its unit; [] where there is none."""
    told = _output("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits")
    return [line.strip() for line in told.splitlines()]


def processor() -> str:
    """The CPU's model and its flags of `GEMM_FLAGS`."""
    fields: dict[str, str] = {}
    if Path("/proc/cpuinfo").exists():
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    flags = [flag for flag in GEMM_FLAGS if flag in fields.get("flags", "").split()]
    model = fields.get("model name") or platform.processor() or platform.machine()
    return model + (f" ({', '.join(flags)})" if flags else "")


def argv() -> tuple[str, ...]:
    """The command line without its folders, because a provenance is published."""
    return tuple(Path(word).name if os.sep in word else word for word in sys.argv)


def _output(*command: str) -> str:
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - fixed words
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()
