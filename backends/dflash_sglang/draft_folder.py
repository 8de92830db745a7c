"""The drafter as SGLang reads it: z-lab's dialect, bfloat16, one file, plain names."""

from __future__ import annotations

from pathlib import Path

from dflash_serve.checkpoint.reader import Checkpoint, load_tensors
from dflash_serve.checkpoint.writer import write_drafter


def write_draft_folder(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes it, whole or not at all; replaces one written before.

    Raises:
        UserError: the checkpoint has problems, or something else stands there.
    """
    import torch

    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_tensors(checkpoint).items()}
    assert checkpoint.config is not None
    write_drafter(folder, checkpoint.config, tensors, dialect="zlab", overwrite=True)
