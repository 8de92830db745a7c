"""Prometheus' own checker of rules: from PATH, else out of Debian's package, which is unpacked and not installed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from .helm import CACHE


def promtool() -> Path:
    """The binary, fetched where it is not yet; without it the test is skipped."""
    found, kept = shutil.which("promtool"), CACHE / "promtool"
    if found or kept.is_file():
        return Path(found or kept)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        try:
            subprocess.run(["apt-get", "download", "-qq", "prometheus"], cwd=folder, check=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("no promtool on PATH, and no Debian mirror to fetch it from")
        (package,) = Path(folder).glob("*.deb")
        subprocess.run(["dpkg", "-x", package, f"{folder}/out"], check=True)
        Path(folder, "out/usr/bin/promtool").replace(kept)
    return kept
