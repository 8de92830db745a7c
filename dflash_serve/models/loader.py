"""Loads a target, its tokenizer, and a drafter of any dialect, by name, folder or hub id."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dflash_serve.checkpoint.reader import load_tensors, open_checkpoint
from dflash_serve.checkpoint.source import target_folder
from dflash_serve.errors import UserError
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.target import TargetModel
from dflash_serve.models.target_weights import load_weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_drafter(
    folder_or_id: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    revision: str | None = None,
) -> Drafter:
    """Loads a drafter of any dialect, in eval mode and without gradients; `dtype` None keeps what is stored.

    Raises:
        UserError: the first of its problems, and how many more there are.
    """
    checkpoint = open_checkpoint(folder_or_id, revision)
    tensors = load_tensors(checkpoint)
    assert checkpoint.config is not None
    with torch.device("meta"):
        drafter = Drafter(checkpoint.config)
    state = {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()}
    drafter.load_state_dict(state, assign=True)
    drafter.rotary.to(device)
    return drafter.eval().requires_grad_(False)


def load_target(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    revision: str | None = None,
) -> TargetModel:
    """Loads a target; fp32 on CPU and bf16 elsewhere unless `dtype` says otherwise."""
    if dtype is None:
        dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    return load_weights(target_folder(name, revision), dtype=dtype, device=device)


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The target's own tokenizer and chat template."""
    from transformers import AutoTokenizer

    folder = target_folder(name, revision)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"no usable tokenizer ({str(error).splitlines()[0]})", where=str(folder)) from None
