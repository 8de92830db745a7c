"""Folders that look as if `dflash-serve build` had made them, and damage to them."""

from __future__ import annotations

from pathlib import Path

from dflash_serve.checkpoint.files import MANIFEST, Manifest, file_entries


def seal(folder: Path) -> Path:
    """Gives a folder the manifest of what is in it."""
    nothing: dict[str, object] = {"inputs": {}, "parameters": {}, "tools": {}, "measured": {}}
    fields = {"step": folder.name, "key": "k", "seconds": 1, "files": file_entries(folder), **nothing}
    (folder / MANIFEST).write_text(Manifest.model_validate(fields).model_dump_json())
    return folder


def flip_last_byte(path: Path) -> None:
    """One bit of a file's last byte."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
