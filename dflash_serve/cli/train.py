"""`dflash-serve train`: a drafter for any supported target, from one recipe."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dflash_serve.cli import options
from dflash_serve.common.extras import need
from dflash_serve.common.files import require_writable


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
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Train a drafter for a target on answers the target writes itself.

    JSON is the finished drafter's provenance.json, or null where the run has not ended.
    """
    need("train", "safetensors", "torch", "transformers")
    from dflash_serve.checkpoint.source import PROVENANCE
    from dflash_serve.training.recipe import load_recipe
    from dflash_serve.training.run import DRAFTER, choose_device, run

    settings = load_recipe(recipe)
    require_writable(output)
    data_only = stage is Stage.data
    done = run(settings, output, device=choose_device(device), resume=resume, data_only=data_only, quiet=quiet)
    if as_json:
        provenance = output / DRAFTER / PROVENANCE
        typer.echo(provenance.read_text(encoding="utf-8") if provenance.is_file() else "null", nl=False)
    if not done:
        raise typer.Exit(130)  # as after any other interruption
