"""The training sequences in memory, and their context features: online, kept between epochs as far as memory allows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dflash_serve.errors import UserError
from dflash_serve.training.shards import Answer, Manifest, read_shard
from dflash_serve.training.target import Target, target_features

SHORTEST = 2
"""Answer tokens below which no slot can be predicted: the anchor and one more."""


def load_answers(
    folder: Path, manifest: Manifest, *, validation_share: float, seed: int
) -> tuple[list[Answer], list[Answer]]:
    """All answers, split into (training, validation) by the prompt, so that both stay what they are when data is added.

    Raises:
        UserError: nothing to train on, or a shard is broken.
    """
    answers = [answer for entry in manifest.shards for answer in read_shard(folder, entry)]
    answers = [answer for answer in answers if len(answer.tokens) - answer.prompt_length >= SHORTEST]
    training: list[Answer] = []
    validation: list[Answer] = []
    for answer in answers:
        chance = random.Random(seed * 2_000_003 + answer.prompt_index).random()  # noqa: S311 - no secret
        (validation if chance < validation_share else training).append(answer)
    if not training:
        raise UserError("no answers to train on", where=str(folder), do="give more prompts")
    return training, validation


class Features:
    """Context features of the training sequences by index; those computed first are kept, up to `cache_gib`."""

    def __init__(self, target: Target, answers: Sequence[Answer], layer_ids: Sequence[int], cache_gib: float) -> None:
        self.target, self.answers, self.layer_ids = target, answers, layer_ids
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
        missing = [index for index in dict.fromkeys(indexes) if index not in self.kept]
        fresh = self._compute(missing)
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


def seen_vocabulary(answers: Sequence[Answer]) -> Tensor:
    """Token ids that occur in the answers, sorted, int64."""
    found: Tensor = torch.unique(torch.cat([a.tokens[a.prompt_length :] for a in answers]))
    return found.to(torch.int64)
