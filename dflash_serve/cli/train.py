"""`dflash-serve train`: a drafter for any supported target, from one recipe."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dflash_serve.cli import options


class Stage(StrEnum):
    """The stages of a training run at which it can stop."""

    data = "data"
    all = "all"


def train(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe: target, data, drafter, training, seed.")],
    output: Annotated[Path, typer.Option(help="Folder for data, checkpoints, log and the finished drafter.")] = Path(
        "drafter"
    ),
    resume: options.Resume = False,
    device: Annotated[str, typer.Option(help="Where to train: auto, cpu, cuda or cuda:N.")] = "auto",
    stage: Annotated[Stage, typer.Option(help="How far to go; data: until the answers are there.")] = Stage.all,
) -> None:
    """Train a drafter for a target on answers the target writes itself."""
    from dflash_serve.training.malloc import keep_freed_memory

    keep_freed_memory()  # before torch
    import torch

    from dflash_serve.models.loader import load_target, load_tokenizer
    from dflash_serve.training.recipe import load_recipe
    from dflash_serve.training.run import choose_device, run

    settings = load_recipe(recipe)
    model, revision = settings.target.model, settings.target.revision
    # Never fp16: features reach 25,000, too near its end.
    target = load_target(model, dtype=torch.bfloat16, device=choose_device(device), revision=revision)
    tokenizer = load_tokenizer(model, revision)
    run(settings, target, tokenizer, output, resume=resume, data_only=stage is Stage.data)
