"""Reads any drafter checkpoint, strictly: what is missing, extra, misshapen or not finite is an error before launch.

Engines are lenient here (SGLang 0.5.23 ignores unknown names and never looks for missing ones) and then accept nothing.
Only `load_*` need torch; `read_config` and the checks by `problems(weights=False)` read JSON and safetensors headers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.checkpoint.dialects import Dialect, parse
from dflash_serve.checkpoint.headers import Header, read_headers
from dflash_serve.checkpoint.source import drafter_source, local_folder
from dflash_serve.checkpoint.tensor_check import Piece, match_tensors
from dflash_serve.checkpoint.tensor_names import proper_name
from dflash_serve.errors import Problem, raise_problems

if TYPE_CHECKING:
    from torch import Tensor

MASK_EMBEDDING = "mask_embedding"
HINT = "`dflash-serve inspect` shows all"


@dataclass
class Checkpoint:
    """A drafter folder as read: everything is filled in as far as it could be understood."""

    folder: Path
    problems: list[Problem] = field(default_factory=list)
    config: DrafterConfig | None = None
    dialect: Dialect | None = None
    headers: dict[str, Header] = field(default_factory=dict)
    pieces: dict[str, Piece] = field(default_factory=dict)
    """Our tensor names -> where they are."""


def open_checkpoint(folder_or_id: str | Path, revision: str | None = None) -> Checkpoint:
    """Reads config.json and the safetensors headers, and notes every problem; reads no weights.

    Raises:
        UserError: neither a folder nor an id that can be fetched.
    """
    checkpoint = Checkpoint(local_folder(drafter_source(folder_or_id), revision))
    weight_problems: list[Problem] = []
    checkpoint.headers = read_headers(checkpoint.folder, weight_problems)
    _read_config(checkpoint)
    checkpoint.problems += weight_problems
    if checkpoint.config is not None and checkpoint.dialect is not None and not weight_problems:
        checkpoint.pieces = match_tensors(
            checkpoint.headers, checkpoint.config, checkpoint.dialect.copies_of_target, checkpoint.problems
        )
    return checkpoint


def _read_config(checkpoint: Checkpoint) -> None:
    raw = _read_json(checkpoint.folder / "config.json", checkpoint.problems)
    if raw is None:
        return
    pickled = checkpoint.folder / f"{MASK_EMBEDDING}.pt"
    if pickled.exists():
        checkpoint.problems.append(
            Problem("a pickled mask embedding is never loaded", str(pickled), "store it as tensor mask_embedding")
        )
    has_mask_embedding = any(proper_name(name) == MASK_EMBEDDING for name in checkpoint.headers)
    checkpoint.config, checkpoint.dialect = parse(
        raw, checkpoint.folder / "config.json", checkpoint.problems, has_mask_embedding=has_mask_embedding
    )


def _read_json(path: Path, problems: list[Problem]) -> Mapping[str, object] | None:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(Problem("no config.json", str(path.parent), "give a drafter's folder"))
    except (ValueError, OSError) as error:
        problems.append(Problem(f"not valid JSON ({error})", str(path), "download the drafter again"))
    else:
        if isinstance(raw, dict):
            return raw
        problems.append(Problem("not a JSON object", str(path), "download the drafter again"))
    return None


def read_config(folder_or_id: str | Path, revision: str | None = None) -> tuple[DrafterConfig, str]:
    """The neutral description of a drafter and the name of its dialect; needs config.json only.

    Raises:
        UserError: config.json is absent, broken, of no dialect we know, or describes a drafter we cannot run.
    """
    checkpoint = Checkpoint(local_folder(drafter_source(folder_or_id), revision))
    checkpoint.headers = read_headers(checkpoint.folder, [])
    _read_config(checkpoint)
    raise_problems(checkpoint.problems, hint=HINT)
    assert checkpoint.config is not None
    assert checkpoint.dialect is not None
    return checkpoint.config, checkpoint.dialect.name


def problems(folder_or_id: str | Path, revision: str | None = None, *, weights: bool = True) -> list[Problem]:
    """Everything wrong with a drafter; `weights` also reads every number, looking for NaN and infinity (needs torch).

    Raises:
        UserError: neither a folder nor an id that can be fetched.
    """
    checkpoint = open_checkpoint(folder_or_id, revision)
    return checkpoint.problems + (weight_problems(checkpoint) if weights else [])


def weight_problems(checkpoint: Checkpoint) -> list[Problem]:
    """NaN and infinity in the tensors that were found; needs torch."""
    found: list[Problem] = []
    for _ in read_tensors(checkpoint, found):
        pass
    return found


def read_tensors(checkpoint: Checkpoint, problems: list[Problem]) -> Iterator[tuple[str, Tensor]]:
    """Our name and the tensor, memory-mapped, as stored; one that is not finite is added to `problems`."""
    from safetensors import SafetensorError, safe_open

    for file in sorted({piece.file for piece in checkpoint.pieces.values()}):
        try:
            with safe_open(file, framework="pt") as opened:
                for name, piece in checkpoint.pieces.items():
                    if piece.file == file:
                        tensor = opened.get_tensor(piece.stored_name)[piece.rows]
                        _check_finite(name, tensor, file, problems)
                        yield name, tensor
        except SafetensorError as error:
            problems.append(Problem(f"not a safetensors file ({error})", str(file), "download the drafter again"))


def _check_finite(name: str, tensor: Tensor, file: Path, problems: list[Problem]) -> None:
    bad = tensor.numel() - int(tensor.isfinite().sum())
    if bad:
        what = f"tensor {name} has {bad} values that are NaN or infinite, of {tensor.numel()}"
        problems.append(Problem(what, str(file), "download the drafter again, or train it again"))


def load_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Every tensor by our name, in the dtype it is stored in.

    Raises:
        UserError: the checkpoint has problems.
    """
    raise_problems(checkpoint.problems, hint=HINT)
    found: list[Problem] = []
    tensors = dict(read_tensors(checkpoint, found))
    raise_problems(found, hint=HINT)
    return tensors
