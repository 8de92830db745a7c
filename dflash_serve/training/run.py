"""A whole run: data, then training, then the finished drafter."""

from __future__ import annotations

from pathlib import Path

import torch

from dflash_serve.errors import UserError
from dflash_serve.training.answers import make_data, totals
from dflash_serve.training.recipe import Recipe
from dflash_serve.training.target import Target, Tokenizer


def choose_device(name: str) -> tuple[torch.device, torch.dtype]:
    """`auto` is the GPU where there is one. The target runs in bf16 either way: features reach 25,000, too near fp16's end."""
    available = torch.cuda.is_available()
    if name.startswith("cuda") and not available:
        raise UserError(f"{name!r} is asked for, but PyTorch sees no GPU", where="--device", do="use auto or cpu")
    return torch.device(("cuda" if available else "cpu") if name == "auto" else name), torch.bfloat16


def run(
    recipe: Recipe, target: Target, tokenizer: Tokenizer, output: Path, *, resume: bool = False, data_only: bool = False
) -> None:
    """Makes the data and trains on it; every file lands under `output`."""
    from rich.console import Console

    console = Console(stderr=True)
    manifest = make_data(recipe, target, tokenizer, output / "data", lambda what, n: console.print(f"{what}: {n}"))
    answers, tokens, answer_tokens = totals(manifest.shards)
    console.print(f"data: {answers} answers, {tokens} tokens, {answer_tokens} of them answered")
