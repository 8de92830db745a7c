"""Answers on disk: safetensors shards of flat token ids, and a manifest. Both appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_serve.common.frozen import Frozen
from dflash_serve.errors import UserError

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Answer:
    """One training sequence: prompt and answer as token ids int32 [length], and how long the prompt is."""

    prompt_index: int
    tokens: Tensor
    prompt_length: int


class ShardEntry(Frozen):
    """One shard in the manifest."""

    file: str
    sha256: str
    answers: int
    tokens: int
    answer_tokens: int


class Manifest(Frozen):
    """What a data folder holds, and what it was made from."""

    recipe_sha256: str
    target: str
    prompts: int
    shards: tuple[ShardEntry, ...] = ()
    ended: int = 0
    """Answers that ended by themselves; the others were cut by the limit or in a loop."""
    looped: int = 0
    dropped: int = 0
    """Answers too short or not distinct."""
    seconds: float = 0.0
    finished: bool = False


def write_shard(folder: Path, number: int, answers: Sequence[Answer]) -> ShardEntry:
    """Writes a shard under a temporary name, then renames it."""
    path = folder / f"answers-{number:05d}.safetensors"
    lengths = torch.tensor([len(a.tokens) for a in answers])
    tensors = {
        "tokens": torch.cat([a.tokens for a in answers]).int(),
        "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        "prompt_lengths": torch.tensor([a.prompt_length for a in answers], dtype=torch.int32),
        "prompt_indexes": torch.tensor([a.prompt_index for a in answers], dtype=torch.int32),
    }
    scratch = path.with_suffix(".tmp")
    save_file(tensors, scratch)
    os.replace(scratch, path)
    total = int(lengths.sum())
    return ShardEntry(
        file=path.name,
        sha256=file_sha256(path),
        answers=len(answers),
        tokens=total,
        answer_tokens=total - sum(a.prompt_length for a in answers),
    )


def read_shard(folder: Path, entry: ShardEntry) -> list[Answer]:
    """Reads a shard back.

    Raises:
        UserError: missing, or not what the manifest says.
    """
    path = folder / entry.file
    if not path.exists() or file_sha256(path) != entry.sha256:
        raise UserError("missing or changed since it was written", where=str(path), do="make the data again")
    tensors = load_file(path)
    tokens = tensors["tokens"].tensor_split(tensors["offsets"][1:-1])
    prompts = zip(tensors["prompt_indexes"].tolist(), tensors["prompt_lengths"].tolist(), strict=True)
    return [Answer(index, row, length) for row, (index, length) in zip(tokens, prompts, strict=True)]


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's manifest, None if there is none yet."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UserError(f"not a data manifest ({error.errors()[0]['msg']})", where=str(path)) from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces the manifest at one stroke."""
    write_text(folder / MANIFEST, manifest.model_dump_json(indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file under a temporary name, then renames it."""
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)


def write_lines(path: Path, texts: Sequence[str]) -> None:
    """Writes {"prompt": text} lines, whole or not at all."""
    write_text(path, "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in texts))


def file_sha256(path: Path) -> str:
    """Checksum of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
