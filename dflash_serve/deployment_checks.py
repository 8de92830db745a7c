"""What holds for every engine: no block or width beyond the drafter, no length beyond the target, no changed file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.manifest import verify
from dflash_serve.checkpoint.source import drafter_source
from dflash_serve.checkpoint.target_shape import TargetShape
from dflash_serve.deployment import Deployment
from dflash_serve.errors import Problem


def uses_drafter(deployment: Deployment) -> bool:
    """Whether the drafter is loaded at all."""
    return deployment.drafter is not None and deployment.speculation.width not in ("off", 1)


def block_problems(deployment: Deployment, drafter: DrafterConfig) -> Iterator[Problem]:
    """A block or a width that the drafter cannot fill."""
    speculation, trained = deployment.speculation, drafter.block_size
    block = speculation.block_size or trained
    if block > trained:
        what = f"block_size {block} is larger than the drafter's {trained}"
        do = f"use {trained} or less: a drafter cannot fill slots it was not trained for"
        yield Problem(what, "speculation.block_size", do)
    if isinstance(speculation.width, int) and speculation.width > block:
        what = f"width {speculation.width} is larger than the block of {block} slots"
        yield Problem(what, "speculation.width", f"use 1 to {block}, auto or off")


def length_problems(deployment: Deployment, target: TargetShape) -> Iterator[Problem]:
    """More tokens than the target has positions."""
    asked, most = deployment.limits.max_model_len, target.max_position_embeddings
    if asked is not None and most is not None and asked > most:
        what = f"{asked} is more than the target's {most} positions"
        yield Problem(what, "limits.max_model_len", f"use {most} or less")


def changed_files(deployment: Deployment) -> list[Problem]:
    """Files of what `dflash-serve build` made that are not what it made; asked before anything is loaded.

    Raises:
        UserError: a manifest cannot be read.
    """
    folders = [Path(deployment.target.model)]
    if deployment.drafter is not None and uses_drafter(deployment):
        folders.append(Path(drafter_source(deployment.drafter.model)))
    return [problem for folder in folders if folder.is_dir() for problem in verify(folder)]
