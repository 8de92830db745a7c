"""Where a target comes from: the bundled `smollm2`, a local folder, or a hub id."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dflash_serve.drafter.source import local_folder
from dflash_serve.errors import UserError

from .smollm2 import ALIAS, smollm2_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from .model import TargetModel

FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""What is fetched from the hub: never code, never pickle."""


def target_source(name: str) -> str | Path:
    """The folder of the bundled target, converted first where need be; any other name as it is."""
    return smollm2_folder() if name == ALIAS else name


def target_folder(name: str, revision: str | None = None) -> Path:
    """The local folder of a target, fetched or converted first where need be.

    Raises:
        UserError: neither an alias, a folder nor an id that can be fetched.
    """
    return local_folder(target_source(name), revision, files=FILES)


def load_target(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    revision: str | None = None,
) -> TargetModel:
    """Loads a target; fp32 on CPU and bf16 elsewhere unless `dtype` says otherwise."""
    import torch

    from .weights import load_weights

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
