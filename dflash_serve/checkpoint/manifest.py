"""manifest.json: what a built folder holds, byte for byte, and where it came from. Whoever loads the folder checks it.

No torch here: checking is reading and hashing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from dflash_serve.common.files import sha256
from dflash_serve.common.frozen import Frozen
from dflash_serve.errors import Problem, UserError

NAME = "manifest.json"
DO = "build it again"


class FileEntry(Frozen):
    """One file."""

    sha256: str
    size: int


class Manifest(Frozen):
    """A folder's own account of itself."""

    step: str
    """The build step that wrote it."""
    key: str
    """Digest of everything that determined its contents."""
    inputs: Mapping[str, str]
    """Name of each input -> its digest."""
    parameters: Mapping[str, object]
    tools: Mapping[str, str]
    """Package -> version."""
    seconds: float
    measured: Mapping[str, object]
    """Errors, sizes, acceptance: as they came out."""
    files: Mapping[str, FileEntry]
    """Path below the folder -> what it must be; the manifest itself is not in it."""

    @property
    def digest(self) -> str:
        """Stands for the contents, whatever they were made from."""
        text = "\n".join(f"{name} {entry.sha256}" for name, entry in sorted(self.files.items()))
        return hashlib.sha256(text.encode()).hexdigest()


def file_entries(folder: Path) -> dict[str, FileEntry]:
    """Every file below the folder but its manifest; links are followed."""
    return {
        path.relative_to(folder).as_posix(): FileEntry(sha256=sha256(path), size=path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / NAME
    }


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's manifest; None where it has none, because it was not built by us.

    Raises:
        UserError: it has one that cannot be read.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        return Manifest.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValidationError, OSError, UnicodeDecodeError):
        raise UserError("cannot be read as a manifest", where=str(path), do=DO) from None


def verify(folder: Path) -> list[Problem]:
    """Every file that is not what the folder's manifest says; nothing for a folder without one.

    Raises:
        UserError: the manifest itself cannot be read.
    """
    manifest = read_manifest(folder)
    return [] if manifest is None else list(_differences(folder, manifest))


def _differences(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            yield Problem("is missing", str(path), DO)
        elif path.stat().st_size != entry.size:
            yield Problem(f"has {path.stat().st_size} bytes, its manifest says {entry.size}", str(path), DO)
        elif sha256(path) != entry.sha256:
            yield Problem("its contents are not those it was built with (sha256 differs)", str(path), DO)
    known = set(manifest.files)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in known and name != NAME:
            yield Problem("is not in the manifest", str(path), "remove it, or build it again")
