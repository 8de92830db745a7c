"""The training data: answers on disk as safetensors shards of flat token ids with a manifest, and in memory with their
context features, computed online and kept between epochs as far as memory allows.
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

from dflash_serve.common.files import sha256, write_whole
from dflash_serve.common.settings import Frozen
from dflash_serve.errors import UserError
from dflash_serve.models.attention import PackedCausalAttention
from dflash_serve.models.target import TargetModel

SHORTEST = 2
"""Answer tokens below which no slot can be predicted: the anchor and one more."""
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Example:
    """One training sequence: prompt and answer as token ids int32 [length], and how long the prompt is."""

    prompt_index: int
    tokens: Tensor
    prompt_length: int
    says: Tensor | None = None
    """Of a text that others wrote: what the target would say after each of its tokens, int32 [length]."""
    features: Tensor | None = None
    """[length - 1, F*H] of `DataManifest.feature_layers`, where they were kept as the answer was written."""


class ShardEntry(Frozen):
    """One shard in the manifest."""

    file: str
    sha256: str
    answers: int
    tokens: int
    answer_tokens: int


class DataManifest(Frozen):
    """What a data folder holds, and what it was made from."""

    recipe_sha256: str
    target: str
    prompts: int
    excluded: int = 0
    """Prompts left out because they are too like an evaluation's."""
    shards: tuple[ShardEntry, ...] = ()
    texts: tuple[ShardEntry, ...] = ()
    texts_excluded: int = 0
    texts_finished: bool = False
    ended: int = 0
    """Answers that ended by themselves; the others were cut by the limit or in a loop."""
    looped: int = 0
    dropped: int = 0
    """Answers too short or not distinct."""
    feature_layers: tuple[int, ...] = ()
    """Layers of the target whose outputs are kept with the answers."""
    seconds: float = 0.0
    finished: bool = False
    """All prompts are answered; not where the time given for it ran out."""


def write_shard(folder: Path, number: int, answers: Sequence[Example], *, kind: str = "answers") -> ShardEntry:
    """Writes a shard, whole or not at all."""
    path = folder / f"{kind}-{number:05d}.safetensors"
    lengths = torch.tensor([len(a.tokens) for a in answers])
    tensors = {
        "tokens": torch.cat([a.tokens for a in answers]).int(),
        "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        "prompt_lengths": torch.tensor([a.prompt_length for a in answers], dtype=torch.int32),
        "prompt_indexes": torch.tensor([a.prompt_index for a in answers], dtype=torch.int32),
    }
    said = [a.says for a in answers if a.says is not None]
    if said:
        tensors["says"] = torch.cat(said).int()
    kept = [a.features for a in answers if a.features is not None]
    if kept:
        tensors["features"] = torch.cat(kept)
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
    nothing = [None] * len(tokens)
    says = tensors["says"].tensor_split(ends) if "says" in tensors else nothing
    # Left where they are in the file: the system reads them as they are used, and keeps what it has room for.
    features = tensors["features"].split([len(each) - 1 for each in tokens]) if "features" in tensors else nothing
    indexes, lengths = tensors["prompt_indexes"].tolist(), tensors["prompt_lengths"].tolist()
    return [Example(*fields) for fields in zip(indexes, tokens, lengths, says, features, strict=True)]


def read_manifest(folder: Path) -> DataManifest | None:
    """The folder's manifest, None if there is none yet."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        return DataManifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UserError(f"not a data manifest ({error.errors()[0]['msg']})", where=str(path)) from None


def write_manifest(folder: Path, manifest: DataManifest) -> None:
    """Replaces the manifest, whole or not at all."""
    write_whole(folder / MANIFEST, manifest.model_dump_json(indent=2) + "\n")


def totals(entries: tuple[ShardEntry, ...]) -> tuple[int, int, int]:
    """Answers, tokens and answer tokens of all shards."""
    return sum(e.answers for e in entries), sum(e.tokens for e in entries), sum(e.answer_tokens for e in entries)


def load_answers(
    folder: Path, manifest: DataManifest, *, validation_share: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """All answers, split into (training, validation) by the prompt, so that both stay what they are when data is added;
    texts are trained on, all of them.

    Raises:
        UserError: nothing to train on, or a shard is broken.
    """
    answers = [answer for entry in manifest.shards for answer in read_shard(folder, entry)]
    answers = [answer for answer in answers if len(answer.tokens) - answer.prompt_length >= SHORTEST]
    training: list[Example] = []
    validation: list[Example] = []
    for answer in answers:
        chance = random.Random(seed * 2_000_003 + answer.prompt_index).random()  # noqa: S311 - no secret
        (validation if chance < validation_share else training).append(answer)
    training += [text for entry in manifest.texts for text in read_shard(folder, entry)]
    if not training:
        raise UserError("no answers to train on", where=str(folder), do="give more prompts")
    return training, validation


def seen_vocabulary(answers: Sequence[Example], least: int = 1) -> Tensor:
    """Token ids that are to be predicted in the answers and texts `least` times or more, sorted, int64.

    Raises:
        UserError: there are none.
    """
    wanted = [a.tokens[a.prompt_length :] if a.says is None else a.says[a.prompt_length :] for a in answers]
    found, counts = torch.unique(torch.cat(wanted), return_counts=True)
    kept: Tensor = found[counts >= least]
    if not len(kept):
        do = "lower training.seen_at_least, or make more data"
        raise UserError(f"no token is in the data {least} times", where="training.seen_at_least", do=do)
    return kept.to(torch.int64)


class Features:
    """Context features of the training sequences by index: those of the data, or computed and the first of them kept.

    Args:
        written: layers of the features that come with the answers; taken where they begin with `layer_ids`.
        cache_gib: most memory for computed ones.
    """

    def __init__(
        self,
        target: TargetModel,
        answers: Sequence[Example],
        layer_ids: Sequence[int],
        cache_gib: float,
        written: Sequence[int] = (),
    ) -> None:
        self.target, self.answers, self.layer_ids = target, answers, tuple(layer_ids)
        self.written = tuple(written[: len(layer_ids)]) == self.layer_ids
        row = len(layer_ids) * target.config.hidden_size
        wanted = sum(len(answer.tokens) for answer in answers if not self._has(answer))
        rows = min(wanted, int(cache_gib * 2**30) // (row * target.embedding.element_size()))
        # One block of memory: thousands of pieces kept among what every step takes and frees would slow malloc down.
        self.room = torch.empty(rows, row, dtype=target.embedding.dtype, device=target.embedding.device)
        self.used = 0
        self.kept: dict[int, Tensor] = {}

    def token_ids(self, index: int) -> Tensor:
        """int64 [length] on the target's device."""
        return self.answers[index].tokens.to(self.target.embedding.device, torch.int64)

    def of(self, indexes: Sequence[int]) -> list[Tensor]:
        """One [length, F*H] a sequence, or but for its last row, in the target's dtype."""
        known = {index: self._written(self.answers[index]) for index in indexes if self._has(self.answers[index])}
        missing = [index for index in dict.fromkeys(indexes) if index not in known and index not in self.kept]
        known |= self._compute(missing)
        return [known[index] if index in known else self.kept[index] for index in indexes]

    def _has(self, answer: Example) -> bool:
        return self.written and answer.features is not None

    def _written(self, answer: Example) -> Tensor:
        assert answer.features is not None
        return answer.features[:, : self.room.shape[1]].to(self.target.embedding)

    def _compute(self, indexes: Sequence[int]) -> dict[int, Tensor]:
        if not indexes:
            return {}
        sequences = [self.token_ids(index) for index in indexes]
        fresh = dict(zip(indexes, target_features(self.target, sequences, self.layer_ids), strict=True))
        for index, features in fresh.items():
            end = self.used + len(features)
            if end <= len(self.room):
                self.kept[index] = self.room[self.used : end].copy_(features)
                self.used = end
        return fresh


@torch.no_grad()
def target_features(target: TargetModel, sequences: Sequence[Tensor], target_layer_ids: Sequence[int]) -> list[Tensor]:
    """Context features of whole sequences, computed online in the target's dtype.

    Args:
        sequences: token ids int64 [length] each, on the target's device.

    Returns:
        one [length, F*H] a sequence.
    """
    lengths, device = [len(s) for s in sequences], target.embedding.device
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    attention = PackedCausalAttention(lengths, target.config.layers, device)
    features = target.features(torch.cat(list(sequences)), positions, attention, target_layer_ids)
    return list(features.split(lengths))
