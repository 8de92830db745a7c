"""Where a build starts: the folders of target and drafter, the prompts, and a digest of what is in them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from dflash_serve.checkpoint.manifest import file_entries
from dflash_serve.checkpoint.source import drafter_folder, target_folder
from dflash_serve.common.files import sha256
from dflash_serve.deployment import Model
from dflash_serve.errors import UserError

SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model")
"""Files that a digest covers."""


@dataclass(frozen=True)
class Source:
    """A folder, or a file of prompts, that the build reads."""

    folder: Path
    digest: str
    description: dict[str, object]
    """For the manifest: what was asked for, and what it was."""


def find_target(model: Model) -> Source:
    """The target, fetched or converted first where need be.

    Raises:
        UserError: it cannot be found.
    """
    return _source(model, target_folder(model.model, model.revision))


def find_drafter(model: Model) -> Source:
    """The drafter, in any dialect, fetched first where need be.

    Raises:
        UserError: it cannot be found.
    """
    return _source(model, drafter_folder(model.model, model.revision))


def find_prompts(path: Path | None) -> Source | None:
    """A JSONL file of prompts as a source; None where none is given.

    Raises:
        UserError: the file is not there.
    """
    if path is None:
        return None
    if not path.is_file():
        raise UserError("no such file of prompts", where=str(path), do="correct the recipe, or unset its variable")
    digest = sha256(path)
    return Source(path, digest, {"file": path.name, "sha256": digest})


def _source(model: Model, folder: Path) -> Source:
    files = {name: entry for name, entry in file_entries(folder).items() if name.endswith(SUFFIXES)}
    text = "\n".join(f"{name} {entry.sha256}" for name, entry in files.items())
    description: dict[str, object] = {
        "model": model.model,
        "revision": model.revision,
        "files": {name: entry.model_dump() for name, entry in files.items()},
    }
    return Source(folder, hashlib.sha256(text.encode()).hexdigest(), description)
