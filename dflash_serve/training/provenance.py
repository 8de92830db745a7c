"""Where a drafter comes from: enough to make it again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from dflash_serve.common.frozen import Frozen

PACKAGES = ("torch", "transformers", "safetensors", "tokenizers")


class Provenance(Frozen):
    """What, with what, from what, on what, when."""

    argv: tuple[str, ...]
    recipe_sha256: str
    data_sha256: str
    """Of the data's manifest, which names every shard's checksum."""
    initial_sha256: dict[str, str] | None = None
    """Of the drafter that was gone on from: by file."""
    seed: int
    commit: str | None
    versions: dict[str, str]
    hardware: str
    threads: int
    started: str
    ended: str
    steps: int
    training_seconds: float
    data_seconds: float
    answers: int
    answer_tokens: int
    validation: dict[str, float | list[float]] | None


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The git commit of this source tree, None outside of one."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - fixed words
        return found.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def hardware(device: torch.device) -> str:
    """The GPU's name, or the CPU's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = []
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} x {names[0] if names else platform.processor() or platform.machine()}"


def argv() -> tuple[str, ...]:
    """The command line without its folders: a provenance is published, and says nothing of whose machine it was."""
    return tuple(Path(word).name if os.sep in word else word for word in sys.argv)
