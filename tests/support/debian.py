"""Programs out of Debian's packages: from PATH, else the package is fetched and unpacked, and nothing is installed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from .pinned_wheels import CACHE


def promtool() -> Path:
    """Prometheus' own checker of rules."""
    return program("promtool", "prometheus")


def program(name: str, package: str) -> Path:
    """The binary, fetched where it is not yet; without it the test is skipped."""
    found, kept = shutil.which(name), CACHE / name
    if found or kept.is_file():
        return Path(found or kept)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        try:
            subprocess.run(["apt-get", "download", "-qq", package], cwd=folder, check=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip(f"no {name} on PATH, and no Debian mirror to fetch it from")
        (archive,) = Path(folder).glob("*.deb")
        subprocess.run(["dpkg", "-x", archive, f"{folder}/out"], check=True)
        Path(folder, "out/usr/bin", name).replace(kept)
    return kept
