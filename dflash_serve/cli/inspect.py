"""`dflash-serve inspect`: what a drafter is, and everything that is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_serve.cli import options
from dflash_serve.common.extras import need
from dflash_serve.errors import UserError

if TYPE_CHECKING:
    from dflash_serve.checkpoint.config import DrafterConfig
    from dflash_serve.checkpoint.reader import Checkpoint
    from dflash_serve.checkpoint.tensors import Quantization
    from dflash_serve.errors import Problem


def inspect(
    drafter: Annotated[str, typer.Argument(metavar="PATH_OR_ID", help="Folder or hub id of a drafter.")],
    target: options.Target = None,
    revision: options.Revision = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Describe a drafter and list everything wrong with it, by itself or for a --target; exit code 1 if anything is."""
    need("torch", "safetensors", "torch")
    from dflash_serve.checkpoint.reader import open_checkpoint, weight_problems
    from dflash_serve.checkpoint.source import target_source
    from dflash_serve.checkpoint.target import read_target_shape
    from dflash_serve.deployment_checks import check_pairing, pairing_notes

    refuse_idle_revision(drafter, revision)
    checkpoint = open_checkpoint(drafter, revision)
    with reading(drafter, quiet=quiet or as_json):
        problems = checkpoint.problems + weight_problems(checkpoint)
    notes: list[str] = []
    if target is not None and checkpoint.config is not None:
        shape = replace(read_target_shape(target_source(target)), name=target)
        problems += check_pairing(checkpoint.config, shape)
        notes += pairing_notes(checkpoint.config, shape)
        problems += _own_head_problems(checkpoint, target)
    if as_json:
        typer.echo(json.dumps(_as_json(checkpoint, problems, notes), indent=2))
    else:
        _print(checkpoint, problems, notes, quiet=quiet)
    if problems:
        raise typer.Exit(1)


@contextmanager
def reading(drafter: str, *, quiet: bool) -> Iterator[None]:
    """Says on a terminal that weights are read, which takes a while for gigabytes of them."""
    from rich.console import Console

    with Console(stderr=True, quiet=quiet).status(f"reading the weights of {drafter}"):
        yield


def _own_head_problems(checkpoint: Checkpoint, target: str) -> list[Problem]:
    """A head over the whole vocabulary that a checkpoint brings as a copy of the target's, and is none.

    DeepSpec and speculators ship such copies; every engine leaves them out and drafts through the target's.
    """
    from dflash_serve.errors import Problem

    header, config = checkpoint.headers.get("lm_head.weight"), checkpoint.config
    if header is None or config is None or header.shape != (config.vocab_size, config.hidden_size):
        return []
    import torch
    from safetensors import safe_open

    from dflash_serve.checkpoint.conversions import differing_rows
    from dflash_serve.models.loader import head_weight

    with safe_open(header.file, framework="pt") as opened:
        own, head = opened.get_tensor("lm_head.weight"), head_weight(target)
    if own.shape != head.shape:
        return []  # the pairing says so
    differing = differing_rows(own, head, torch.arange(len(own)))
    if not differing:
        return []
    what = f"{differing} of {len(own)} rows of its lm_head are not the target's, through which every engine drafts"
    return [Problem(what, str(header.file), "use the target it was trained for, or a drafter without a head")]


def refuse_idle_revision(drafter: str, revision: str | None) -> None:
    """A revision of what has none would be ignored.

    Raises:
        UserError: the drafter is a folder, or bundled.
    """
    from pathlib import Path

    from dflash_serve.checkpoint.source import drafter_source

    if revision is not None and Path(drafter_source(drafter)).is_dir():
        raise UserError(f"{drafter} is a folder, which has no revisions", where="--revision", do="leave it out")


def _dialect(checkpoint: Checkpoint) -> str | None:
    return None if checkpoint.dialect is None else checkpoint.dialect.name


def _sizes(checkpoint: Checkpoint) -> tuple[int, int]:
    """Parameters and bytes of everything stored; scales are no parameters, and a byte of NVFP4 holds two."""
    from math import prod

    from dflash_serve.checkpoint.tensors import SCALES

    weights = [header for name, header in checkpoint.headers.items() if not name.endswith(SCALES)]
    parameters = sum(prod(header.shape) * (2 if header.dtype == "U8" else 1) for header in weights)
    return parameters, sum(header.bytes for header in checkpoint.headers.values())


def _as_json(checkpoint: Checkpoint, problems: list[Problem], notes: list[str]) -> dict[str, object]:
    parameters, size = _sizes(checkpoint)
    config = checkpoint.config
    return {
        "path": str(checkpoint.folder),
        "dialect": _dialect(checkpoint),
        "quantization": None if checkpoint.quantization is None else asdict(checkpoint.quantization),
        "config": None if config is None else config.model_dump(mode="json"),
        "parameters": parameters,
        "bytes": size,
        "problems": [{"what": p.what, "where": p.where, "do": p.do} for p in problems],
        "notes": notes,
    }


def _print(checkpoint: Checkpoint, problems: list[Problem], notes: list[str], *, quiet: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _rows(checkpoint):
        table.add_row(Text(name, style="bold"), Text(value))
    if not quiet:
        console.print(table)
        for note in notes:
            console.print(Text("note  ", style="bold yellow").append(note, style="default"))
    for problem in problems:
        console.print(Text("problem  ", style="bold red").append(str(problem), style="default"))
    if not problems:
        console.print(Text("no problems found", style="green"))


def _rows(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    parameters, size = _sizes(checkpoint)
    rows = [("drafter", str(checkpoint.folder)), ("dialect", _dialect(checkpoint) or "unknown")]
    rows += [] if checkpoint.quantization is None else [("quantisation", _quantization(checkpoint.quantization))]
    rows += [] if checkpoint.config is None else _config_rows(checkpoint.config)
    return [*rows, ("parameters", f"{parameters:,}"), ("size", f"{size / 2**20:,.1f} MiB")]


def _quantization(found: Quantization) -> str:
    left_out = f"; {', '.join(found.excluded)} in bf16" if found.excluded else ""
    cache = f"; K/V cache {found.kv_cache}" if found.kv_cache else ""
    return found.format.upper() + left_out + cache


def _config_rows(config: DrafterConfig) -> list[tuple[str, str]]:
    heads = f"{config.num_attention_heads} heads, {config.num_key_value_heads} K/V heads, head_dim {config.head_dim}"
    sizes = f"hidden {config.hidden_size}, intermediate {config.intermediate_size}, vocabulary {config.vocab_size:,}"
    mask = "its own mask_embedding" if config.has_mask_embedding else f"token {config.mask_token_id}"
    rope = f"{config.rope.scaling or 'default'}, theta {config.rope.theta:g}"
    rope += f", factor {config.rope.factor:g}" if config.rope.factor is not None else ""
    ids = ", ".join(map(str, config.target_layer_ids))
    depth = "a depth not given" if config.num_target_layers is None else f"{config.num_target_layers}"
    scales = {"embedding scale": config.embedding_scale, "output multiplier": config.output_multiplier}
    extras = [f"{name} {value:g}" for name, value in scales.items() if value != 1.0]
    extras += [] if config.final_logit_softcap is None else [f"logit soft-cap {config.final_logit_softcap:g}"]
    extras += ["attention bias"] if config.attention_bias else []
    return [
        *([("kind", f"{config.family}: {config.words}")] if config.words else []),
        ("block size", f"{config.block_size} (the anchor and {config.block_size - 1} {_slots(config)})"),
        ("mask", mask),
        ("target layers", f"{ids} of {depth} (outputs, 0-based)"),
        *((f"layer {index}", _kind(config, index)) for index in range(config.num_layers)),
        ("attention", heads),
        ("sizes", sizes),
        ("RoPE", f"{rope}, {config.max_position_embeddings:,} positions"),
        ("norm epsilon", f"{config.rms_norm_eps:g}"),
        *([("extras", ", ".join(extras))] if extras else []),
    ]


def _slots(config: DrafterConfig) -> str:
    """Drafted tokens of a block; an anchor-first checkpoint counts its rows, which is one fewer."""
    if config.slots == "fill-in":
        return "masked slots"
    return f"drafted slots; block_size {config.rows()} in config.json"


def _kind(config: DrafterConfig, index: int) -> str:
    kind = config.layers[index]
    window = "full attention" if kind.window is None else f"window of {kind.window}"
    return f"{window}, {'causal' if kind.causal else 'bidirectional'} in the block"
