"""A drafter is compared with its target before either is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_serve.adapter.checks import check_pairing, pairing_notes
from dflash_serve.checkpoint.target import TargetShape, read_target_shape
from dflash_serve.errors import UserError
from tests.support.tiny import tiny_drafter_config

TARGET = TargetShape("some/target", "qwen3", 96, 32, 8, 256)


def test_its_own_target_has_no_problems() -> None:
    assert check_pairing(tiny_drafter_config(), TARGET) == []


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (replace(TARGET, vocab_size=100), ["vocab_size is 96, the target's is 100"]),
        (replace(TARGET, vocab_size=90), ["the target's is 90: it may be a padded size"]),
        (replace(TARGET, hidden_size=64), ["hidden_size is 32, the target's is 64"]),
        (replace(TARGET, num_layers=9), ["trained for a target of 8 layers, this one has 9"]),
        (replace(TARGET, num_layers=5), ["8 layers, this one has 5", "name [5], but the target has layers 0..4"]),
        (replace(TARGET, vocab_size=7), ["the target's is 7", "mask_token_id 7 has no row"]),
        (replace(TARGET, max_position_embeddings=3), ["block_size 4 exceeds the target's 3 positions"]),
    ],
)
def test_every_mismatch_is_named(target: TargetShape, words: list[str]) -> None:
    found = check_pairing(tiny_drafter_config(), target)
    assert len(found) == len(words)
    for problem, word in zip(found, words, strict=True):
        assert word in problem.what
        assert problem.where == "drafter for some/target"
        assert problem.do


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"eos_token_id": [2, 7]}, ["mask_token_id 7 is some/target's eos_token_id"]),
        ({"bos_token_id": 7, "eos_token_id": 2}, ["mask_token_id 7 is some/target's bos_token_id"]),
        ({"eos_token_id": 2}, []),
        ({"rope_theta": 1e6}, ["its RoPE base is 10000, some/target's is 1e+06"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, ["its RoPE is plain"]),
    ],
)
def test_what_a_drafter_hardly_was_trained_with_is_a_note(
    config: dict[str, object], said: list[str], tmp_path: Path
) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 8, "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **config}))
    target = replace(read_target_shape(tmp_path), name="some/target")
    notes = pairing_notes(tiny_drafter_config(), target)
    assert len(notes) == len(said)
    assert all(words in note for words, note in zip(said, notes, strict=True))


def test_a_drafter_that_does_not_say_its_depth_is_checked_by_its_ids() -> None:
    assert check_pairing(tiny_drafter_config(num_target_layers=None), replace(TARGET, num_layers=6)) == []


@pytest.mark.parametrize("nested", [False, True])
def test_a_target_is_described_by_its_config_json(nested: bool, tmp_path: Path) -> None:
    sizes: dict[str, object] = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 8}
    raw = {"model_type": "qwen3_5", **({"text_config": sizes} if nested else sizes)}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_target_shape(tmp_path) == TargetShape(str(tmp_path), "qwen3_5", 96, 32, 8, None)


@pytest.mark.parametrize(("text", "words"), [("{}", "vocab_size is None"), ("{", "not valid JSON"), ("[]", "object")])
def test_a_config_that_is_no_language_models_is_an_error(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=words):
        read_target_shape(tmp_path)
