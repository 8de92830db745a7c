"""Data on disk comes back as it was, or says that it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_serve.errors import UserError
from dflash_serve.training.dataset import (
    DataManifest,
    Example,
    read_manifest,
    read_shard,
    seen_vocabulary,
    write_manifest,
    write_shard,
)
from dflash_serve.training.loss import SlotLoss, Weighting

ANSWERS = [Example(4, torch.arange(7, dtype=torch.int32), 3), Example(9, torch.arange(2, dtype=torch.int32), 1)]


def test_answers_survive_the_disk(tmp_path: Path) -> None:
    entry = write_shard(tmp_path, 0, ANSWERS)
    assert (entry.answers, entry.tokens, entry.answer_tokens) == (2, 9, 5)
    for before, after in zip(ANSWERS, read_shard(tmp_path, entry), strict=True):
        assert (before.prompt_index, before.prompt_length) == (after.prompt_index, after.prompt_length)
        assert torch.equal(before.tokens, after.tokens)
    assert list(tmp_path.iterdir()) == [tmp_path / entry.file]


def test_a_changed_shard_is_refused(tmp_path: Path) -> None:
    entry = write_shard(tmp_path, 0, ANSWERS)
    (tmp_path / entry.file).write_bytes(b"else")
    with pytest.raises(UserError, match="changed"):
        read_shard(tmp_path, entry)


def test_the_manifest_survives_the_disk(tmp_path: Path) -> None:
    manifest = DataManifest(recipe_sha256="x", target="t", prompts=3, shards=(write_shard(tmp_path, 0, ANSWERS),))
    assert read_manifest(tmp_path) is None
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest


def test_tokens_that_are_rare_in_the_data_are_neither_predicted_nor_ruled_out() -> None:
    answers = [Example(0, torch.tensor([1, 2, 3, 3], dtype=torch.int32), 1), Example(1, torch.tensor([9, 5, 3, 2]), 1)]
    assert seen_vocabulary(answers).tolist() == [2, 3, 5]
    kept = seen_vocabulary(answers, least=2)
    assert kept.tolist() == [2, 3]
    loss = SlotLoss(torch.randn(10, 4), Weighting(), kept=kept)
    assert loss.knows(torch.tensor([[1, 2], [3, 5]])).tolist() == [[False, True], [True, False]]


def test_data_without_any_token_that_often_are_refused() -> None:
    answers = [Example(0, torch.tensor([1, 2, 3, 3], dtype=torch.int32), 1)]
    with pytest.raises(UserError, match=r"no token is in the data 3 times; lower training\.seen_at_least"):
        seen_vocabulary(answers, least=3)
