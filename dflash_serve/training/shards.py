"""Answers on disk: safetensors shards of flat token ids, named by a manifest.

Each process of a run writes shards and a manifest of its own; the first one's is the folder's, and takes in the
others' (`take_in`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save
from torch import Tensor

from dflash_serve.common.documents import DATA, read_bytes
from dflash_serve.common.files import sha256, write_whole
from dflash_serve.common.settings import Frozen
from dflash_serve.errors import UserError

MANIFEST = "manifest.json"
COUNTS = ("ended", "looped", "dropped")


@dataclass(frozen=True)
class Example:
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


class DataManifest(Frozen):
    """The contents of a data folder and the digest of its settings."""

    recipe_sha256: str
    target: str
    prompts: int
    excluded: int = 0  # prompts left out because they share words with an evaluation's
    shards: tuple[ShardEntry, ...] = ()
    ended: int = 0  # answers that ended by themselves; the others were cut at the limit or in a loop
    looped: int = 0
    dropped: int = 0  # answers that were too short or a repetition
    seconds: float = 0.0
    finished: bool = False  # all prompts are answered; False after `max_minutes` ran out


def write_shard(folder: Path, number: int, answers: Sequence[Example], rank: int = 0) -> ShardEntry:
    """Writes a shard of the process `rank`, whole or not at all."""
    path = folder / f"answers-{number:05d}{_suffix(rank)}.safetensors"
    lengths = torch.tensor([len(a.tokens) for a in answers])
    tensors = {
        "tokens": torch.cat([a.tokens for a in answers]).int(),
        "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        "prompt_lengths": torch.tensor([a.prompt_length for a in answers], dtype=torch.int32),
        "prompt_indexes": torch.tensor([a.prompt_index for a in answers], dtype=torch.int32),
    }
    write_whole(path, save(tensors))
    total = int(lengths.sum())
    return ShardEntry(
        file=path.name,
        sha256=sha256(path),
        answers=len(answers),
        tokens=total,
        answer_tokens=total - sum(a.prompt_length for a in answers),
    )


def read_shard(folder: Path, entry: ShardEntry) -> list[Example]:
    """Reads a shard back.

    Raises:
        UserError: missing, or not what the manifest says.
    """
    path = folder / entry.file
    if not path.exists() or sha256(path) != entry.sha256:
        raise UserError("missing or changed since it was written", where=str(path), do="make the data again")
    tensors = load_file(path)
    ends = tensors["offsets"][1:-1]
    tokens = tensors["tokens"].tensor_split(ends)
    indexes, lengths = tensors["prompt_indexes"].tolist(), tensors["prompt_lengths"].tolist()
    return [Example(*fields) for fields in zip(indexes, tokens, lengths, strict=True)]


def read_manifest(folder: Path, name: str = MANIFEST) -> DataManifest | None:
    """The folder's manifest, None if there is none yet."""
    path = folder / name
    if not path.exists():
        return None
    try:
        return DataManifest.model_validate_json(read_bytes(path, DATA))
    except ValidationError as error:
        what = f"not a data manifest of this version ({error.errors()[0]['msg']})"
        raise UserError(what, where=str(path), do="give another --output, or remove the folder") from None


def write_manifest(folder: Path, manifest: DataManifest, rank: int = 0) -> None:
    """Replaces the manifest of the process `rank`, whole or not at all."""
    write_whole(folder / f"manifest{_suffix(rank)}.json", manifest.model_dump_json(indent=2) + "\n")


def take_in(folder: Path) -> DataManifest | None:
    """The folder's manifest after it has taken in those of other processes, which are removed; None if there is none.

    Only the first process calls this, when the others write nothing.
    """
    whole, parts = read_manifest(folder), sorted(folder.glob("manifest-*.json"))
    for part in [read_manifest(folder, path.name) for path in parts]:
        if whole is None or part is None or part.recipe_sha256 != whole.recipe_sha256:
            continue
        changes = {"finished": whole.finished and part.finished, "seconds": max(whole.seconds, part.seconds)}
        fresh = tuple(entry for entry in part.shards if entry not in whole.shards)
        if fresh:  # else a kill came between the two steps below, and its answers are counted already
            changes |= {name: getattr(whole, name) + getattr(part, name) for name in COUNTS}
        whole = whole.model_copy(update={**changes, "shards": whole.shards + fresh})
    if whole is not None and parts:
        write_manifest(folder, whole)
    for path in parts:
        path.unlink()
    return whole


def _suffix(rank: int) -> str:
    return f"-{rank}" if rank else ""


def totals(entries: tuple[ShardEntry, ...]) -> tuple[int, int, int]:
    """Answers, tokens and answer tokens of all shards."""
    return sum(e.answers for e in entries), sum(e.tokens for e in entries), sum(e.answer_tokens for e in entries)


def load_answers(
    folder: Path, manifest: DataManifest, *, validation_share: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """All answers in the order of their prompts, split into (training, validation).

    Adding data moves no answer to the other side, and the order is the same whichever process wrote them.

    Raises:
        UserError: nothing to train on, or a shard is broken.
    """
    answers = [answer for entry in manifest.shards for answer in read_shard(folder, entry)]
    answers.sort(key=lambda answer: answer.prompt_index)
    training: list[Example] = []
    validation: list[Example] = []
    for answer in answers:
        chance = random.Random(seed * 2_000_003 + answer.prompt_index).random()  # noqa: S311 - no secret
        (validation if chance < validation_share else training).append(answer)
    if not training:
        raise UserError("no answers to train on", where=str(folder), do="give more prompts")
    return training, validation


def seen_vocabulary(answers: Sequence[Example], least: int = 1) -> Tensor:
    """Token ids that stand in the answers `least` times or more, sorted, int64.

    Raises:
        UserError: there are none.
    """
    wanted = [answer.tokens[answer.prompt_length :] for answer in answers]
    found, counts = torch.unique(torch.cat(wanted), return_counts=True)
    kept: Tensor = found[counts >= least]
    if not len(kept):
        do = "lower training.seen_at_least, or make more data"
        raise UserError(f"no token is in the data {least} times", where="training.seen_at_least", do=do)
    return kept.to(torch.int64)
