"""Data on disk comes back as it was, or says that it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_serve.errors import UserError
from dflash_serve.models.kv_cache import Span
from dflash_serve.models.loader import load_target
from dflash_serve.training.data import (
    WINDOW,
    DataManifest,
    Example,
    Excluded,
    read_manifest,
    read_shard,
    seen_vocabulary,
    target_features,
    write_manifest,
    write_shard,
)
from dflash_serve.training.loss import SlotLoss, Weighting
from dflash_torch.model_runner import TargetRunner

EXAM = "A farmer has twelve cows and buys three more every week; how many are there after five weeks?"
ANSWERS = [Example(4, torch.arange(7, dtype=torch.int32), 3), Example(9, torch.arange(2, dtype=torch.int32), 1)]


def test_answers_and_their_manifest_survive_the_disk_and_a_changed_shard_is_refused(tmp_path: Path) -> None:
    entry = write_shard(tmp_path, 0, ANSWERS)
    assert (entry.answers, entry.tokens, entry.answer_tokens) == (2, 9, 5)
    for before, after in zip(ANSWERS, read_shard(tmp_path, entry), strict=True):
        assert (before.prompt_index, before.prompt_length) == (after.prompt_index, after.prompt_length)
        assert torch.equal(before.tokens, after.tokens)
    assert list(tmp_path.iterdir()) == [tmp_path / entry.file]
    manifest = DataManifest(recipe_sha256="x", target="t", prompts=3, shards=(entry,))
    assert read_manifest(tmp_path) is None
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    (tmp_path / entry.file).write_bytes(b"else")
    with pytest.raises(UserError, match="changed"):
        read_shard(tmp_path, entry)


def test_tokens_that_are_rare_in_the_data_are_neither_predicted_nor_ruled_out() -> None:
    answers = [Example(0, torch.tensor([1, 2, 3, 3], dtype=torch.int32), 1), Example(1, torch.tensor([9, 5, 3, 2]), 1)]
    assert seen_vocabulary(answers).tolist() == [2, 3, 5]
    kept = seen_vocabulary(answers, least=2)
    assert kept.tolist() == [2, 3]
    loss = SlotLoss(torch.randn(10, 4), Weighting(), kept=kept)
    assert loss.knows(torch.tensor([[1, 2], [3, 5]])).tolist() == [[False, True], [True, False]]
    with pytest.raises(UserError, match=r"no token is in the data 9 times; lower training\.seen_at_least"):
        seen_vocabulary(answers, least=9)


def test_near_copies_of_an_evaluation_are_found_and_likeness_is_not() -> None:
    excluded = Excluded([EXAM, "Who are you?"])
    words = EXAM.split()
    assert EXAM.lower().replace("?", "!") in excluded
    assert f"Please: {' '.join(words[: WINDOW + 1])}, he asked." in excluded
    assert "So, who ARE you, my friend?" in excluded
    assert "A farmer has twelve cows and sells three of them; how many are left after five weeks?" not in excluded
    assert "words and words " * 20 + "who are you" not in excluded  # three words in a long text are chance
    assert excluded.found == 3


def test_features_of_packed_sequences_are_those_of_each_alone(tiny_target_folder: Path) -> None:
    target = load_target(str(tiny_target_folder))
    sequences = [torch.tensor(prompt) for prompt in ([5, 6, 7], [9], [30, 31, 32, 33, 34, 35, 36], [7] * 9)]
    for tokens, features in zip(sequences, target_features(target, sequences, (0, 2)), strict=True):
        with torch.no_grad():
            forward = TargetRunner(target, target.new_cache(1, 64), widest=1)
            expected = forward([tokens.tolist()], [Span(0, 0, len(tokens))], (0, 2)).features
        assert expected is not None
        torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-4)
