"""A run's state on disk: weights and optimiser as safetensors, counters as JSON; a checkpoint is whole or absent.

No random state is kept because there is none: what a step trains on is a function of seed and step (`schedule`).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_serve.common.frozen import Frozen
from dflash_serve.errors import UserError
from dflash_serve.training.shards import write_text

CURRENT = "checkpoint"


class Progress(Frozen):
    """Where a run stands."""

    recipe_sha256: str
    step: int = 0
    seconds: float = 0.0
    """Time spent training; pauses are not counted."""


def save_state(output: Path, progress: Progress, groups: dict[str, dict[str, Tensor]]) -> None:
    """Replaces the checkpoint under `output`; a kill at any moment leaves the old or the new one."""
    folder, scratch, old = output / CURRENT, output / f".{CURRENT}.new", output / f".{CURRENT}.old"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for name, tensors in groups.items():
        save_file(
            {key: value.detach().cpu().contiguous() for key, value in tensors.items()}, scratch / f"{name}.safetensors"
        )
    write_text(scratch / "progress.json", progress.model_dump_json(indent=2) + "\n")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(scratch, folder)
    shutil.rmtree(old, ignore_errors=True)


def load_state(output: Path) -> tuple[Progress, dict[str, dict[str, Tensor]]] | None:
    """The last checkpoint under `output`, None if there is none.

    Raises:
        UserError: it cannot be read.
    """
    folder, old = output / CURRENT, output / f".{CURRENT}.old"
    if not folder.exists() and old.exists():  # killed between the two renames
        os.replace(old, folder)
    if not folder.exists():
        return None
    try:
        progress = Progress.model_validate_json((folder / "progress.json").read_bytes())
        groups = {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    except (OSError, ValidationError, SafetensorError) as error:
        what = f"cannot be read ({str(error).splitlines()[0]})"
        raise UserError(what, where=str(folder), do="remove it and train again") from None
    return progress, groups
