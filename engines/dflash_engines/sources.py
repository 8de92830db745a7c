"""Where a build starts: the folders of target and drafter, and a digest of what is in them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from dflash_serve.backend import backend
from dflash_serve.checkpoint import source
from dflash_serve.checkpoint.manifest import file_entries
from dflash_serve.checkpoint.source import local_folder
from dflash_serve.common.files import sha256
from dflash_serve.deployment import Model
from dflash_serve.errors import UserError

SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model")
TARGET_FILES = [f"*{suffix}" for suffix in SUFFIXES]


@dataclass(frozen=True)
class Source:
    """A folder that the build reads."""

    folder: Path
    digest: str
    description: dict[str, object]
    """For the manifest: what was asked for, and what it was."""


def target_source(model: Model) -> Source:
    """The target, fetched or converted first where need be.

    Raises:
        UserError: it cannot be found.
    """
    return _source(model, local_folder(_bundled_target(model.model), model.revision, files=TARGET_FILES))


def drafter_source(model: Model) -> Source:
    """The drafter, in any dialect.

    Raises:
        UserError: it cannot be found.
    """
    return _source(model, local_folder(source.drafter_source(model.model), model.revision))


def prompts_source(path: Path | None) -> Source | None:
    """A JSONL file of prompts as a source; None where none is given.

    Raises:
        UserError: the file is not there.
    """
    if path is None:
        return None
    if not path.is_file():
        raise UserError("no such file of prompts", where=str(path), do="correct the recipe, or unset its variable")
    return Source(path, sha256(path), {"file": path.name, "sha256": sha256(path)})


def _bundled_target(name: str) -> str | Path:
    """The folder of a bundled target; any other name as it is.

    Bundled targets are converted by the embedded backend, which is found as backends are: by its entry point.
    """
    home = type(backend("torch")).__module__.partition(".")[0]
    found: str | Path = import_module(f"{home}.target").target_source(name)
    return found


def _source(model: Model, folder: Path) -> Source:
    files = {name: entry for name, entry in file_entries(folder).items() if name.endswith(SUFFIXES)}
    text = "\n".join(f"{name} {entry.sha256}" for name, entry in files.items())
    description: dict[str, object] = {
        "model": model.model,
        "revision": model.revision,
        "files": {name: entry.model_dump() for name, entry in files.items()},
    }
    return Source(folder, hashlib.sha256(text.encode()).hexdigest(), description)
