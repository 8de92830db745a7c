"""`dflash-serve convert`: the same drafter in another dialect, or in a form that more engines serve."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_serve.cli import options
from dflash_serve.cli.inspect import refuse_idle_revision
from dflash_serve.common.extras import need
from dflash_serve.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from dflash_serve.checkpoint.config import DrafterConfig


FULL = "Draft from all of the target's tokens, through its head: only where the drafter's head is a copy of its rows."
MARKOV = "Add a Markov head that changes no draft: zero, as SGLang's DSPARK wants one, or fresh, to be trained."


class To(StrEnum):
    """The dialects there are; `zlab` is what SGLang, TensorRT-LLM, vLLM and z-lab's own code read."""

    zlab = "zlab"
    speculators = "speculators"
    modelopt = "modelopt"
    deepspec = "deepspec"
    specforge = "specforge"


class MarkovHeadKind(StrEnum):
    """A Markov head to add, which changes no draft: all zeros, or one to be trained."""

    zero = "zero"
    fresh = "fresh"


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder or hub id of a drafter in any dialect.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")],
    to: Annotated[To, typer.Option("--to", help="Dialect to write.")],
    target: options.Target = None,
    revision: options.Revision = None,
    full_vocabulary: Annotated[bool, typer.Option("--full-vocabulary", help=FULL)] = False,
    markov_head: Annotated[MarkovHeadKind | None, typer.Option("--markov-head", help=MARKOV)] = None,
    markov_rank: Annotated[int, typer.Option(help="Rank of the Markov head that is added.", min=1)] = 16,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in DST.")] = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a drafter in another dialect. Weights keep their values and dtypes; nothing half-written is left behind.

    A --target that is given is checked against the drafter, and named in what is written.
    """
    need("torch", "safetensors", "torch")
    from dflash_serve.checkpoint.reader import load_tensors, open_checkpoint
    from dflash_serve.checkpoint.writer import write_drafter

    refuse_idle_revision(source, revision)
    checkpoint = open_checkpoint(source, revision)
    tensors = load_tensors(checkpoint)
    assert checkpoint.config is not None
    assert checkpoint.dialect is not None
    config = checkpoint.config if target is None else _of_target(checkpoint.config, target)
    if full_vocabulary:
        config, tensors = _with_full_vocabulary(config, tensors, target)
    if markov_head is not None:
        config, tensors = _with_markov_head(config, tensors, markov_head, markov_rank)
    write_drafter(destination, config, tensors, dialect=to.value, target=target, overwrite=overwrite)
    note = _note(config, to, target)
    if as_json:
        report = {"source": str(checkpoint.folder), "from": checkpoint.dialect.name, "destination": str(destination)}
        typer.echo(json.dumps({**report, "to": to.value, "tensors": len(tensors), "note": note}))
    elif not quiet:
        told = f"{destination}: {checkpoint.dialect.name} -> {to.value}, {len(tensors)} tensors"
        typer.echo(told + (f"\nnote: {note}" if note else ""))


def _with_full_vocabulary(
    config: DrafterConfig, tensors: dict[str, Tensor], target: str | None
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    if target is None:
        do = "give --target: its head is compared row by row"
        raise UserError("the drafter's head must be the target's", where="--full-vocabulary", do=do)
    from dflash_serve.checkpoint.conversions import with_full_vocabulary
    from dflash_serve.models.loader import head_weight

    return with_full_vocabulary(config, tensors, head_weight(target))


def _with_markov_head(
    config: DrafterConfig, tensors: dict[str, Tensor], kind: MarkovHeadKind, rank: int
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    from dflash_serve.checkpoint.conversions import with_markov_head

    return with_markov_head(config, tensors, rank=rank, fresh=kind is MarkovHeadKind.fresh)


def _of_target(config: DrafterConfig, target: str) -> DrafterConfig:
    """The config with what the target adds to it.

    Raises:
        UserError: the target cannot be read, or the drafter is not its own.
    """
    from dflash_serve.checkpoint.source import target_source
    from dflash_serve.checkpoint.target import read_target_shape
    from dflash_serve.deployment_checks import check_pairing
    from dflash_serve.errors import raise_problems

    shape = replace(read_target_shape(target_source(target)), name=target)
    raise_problems(check_pairing(config, shape), hint="`dflash-serve inspect --target` shows all")
    return config.model_copy(update={"num_target_layers": shape.num_layers})


def _note(config: DrafterConfig, to: To, target: str | None) -> str | None:
    """z-lab's `DFlashDraftModel` reads num_target_layers whether it needs it or not (dflash 0.1.0)."""
    if to is To.speculators:
        if len({kind.causal for kind in config.layers}) > 1:
            return "vLLM 0.32 and 0.33 would make every layer causal, full-attention ones too: give vLLM `--to zlab`"
        return None if target is not None else "the verifier is not named; vLLM serves it by that name: give --target"
    if config.num_target_layers is not None:
        return None
    return "num_target_layers is not known and so not written; z-lab's own code asks for it: give --target"
