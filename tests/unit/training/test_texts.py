"""Texts that others wrote: read, cut, cleared of evaluations, and labelled by the target where they agree with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_serve.errors import UserError
from dflash_serve.models.loader import load_target, load_tokenizer
from dflash_serve.training.blocks import lay_out
from dflash_serve.training.contamination import WINDOW, Excluded
from dflash_serve.training.dataset import (
    DataManifest,
    Example,
    load_answers,
    read_manifest,
    read_shard,
    seen_vocabulary,
    write_shard,
)
from dflash_serve.training.recipe import Recipe, Texts
from dflash_serve.training.texts import cut, make_texts, read_by, read_texts

EXAM = "A farmer has twelve cows and buys three more every week; how many are there after five weeks?"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files as wholes, one of lines; one of them is an exam question in other clothes."""
    source = tmp_path / "texts"
    (source / "deep").mkdir(parents=True)
    (source / "one.txt").write_text("the quick brown fox jumps over the lazy dog. " * 30)
    (source / "deep" / "two.txt").write_text(f"Exercise 7. {EXAM.upper()} Solve it. " + "and so on " * 40)
    lines = [json.dumps({"text": f"number {i} of many words in a row " * 12}) for i in range(3)]
    (source / "lines.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "exam.jsonl").write_text(json.dumps({"prompt": EXAM}))
    return source


def recipe(folder: Path, target: Path, **fields: Any) -> Recipe:
    data = {
        "prompts": [{"kind": "file", "name": "p", "path": folder / "no.jsonl"}],
        "texts": [{"name": "t", "path": f"{folder}/**", "piece_tokens": 40, **fields}],
        "exclude": [str(folder.parent / "exam.jsonl")],
        "answers": {"shard_size": 4},
    }
    raw = {"target": {"model": str(target)}, "data": data, "drafter": {"mask_token_id": 3}, "training": {"steps": 1}}
    return Recipe.model_validate(raw)


def make(settings: Recipe, folder: Path, before: DataManifest | None = None) -> DataManifest:
    folder.mkdir(exist_ok=True)
    name, manifest = settings.target.model, before or DataManifest(recipe_sha256="", target="", prompts=0)
    return make_texts(settings, load_target(name), load_tokenizer(name), folder, manifest, lambda *_: None)


def kept(folder: Path, manifest: DataManifest) -> list[Example]:
    return [text for entry in manifest.texts for text in read_shard(folder, entry)]


def test_every_file_and_line_is_a_text(folder: Path) -> None:
    found = list(read_texts(Texts(name="t", path=f"{folder}/**")))
    assert [text[:9] for text in found] == ["Exercise ", "number 0 ", "number 1 ", "number 2 ", "the quick"]


@pytest.mark.parametrize(("path", "named"), [("nothing/*.txt", "no file"), ("bad.jsonl", "bad.jsonl:2")])
def test_what_is_no_text_is_named(tmp_path: Path, path: str, named: str) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(UserError, match=named):
        list(read_texts(Texts(name="t", path=str(tmp_path / path))))


def test_short_rests_are_left() -> None:
    assert [len(piece) for piece in cut(range(100), 40)] == [40, 40]
    assert [len(piece) for piece in cut(range(112), 40)] == [40, 40, 32]


def test_texts_are_cut_labelled_and_cleared(folder: Path, tiny_target_folder: Path, tmp_path: Path) -> None:
    manifest = make(recipe(folder, tiny_target_folder), tmp_path / "data")
    texts = kept(tmp_path / "data", manifest)
    assert manifest.texts_excluded == 1
    assert manifest.texts_finished
    assert len({tuple(text.tokens.tolist()) for text in texts}) == len(texts) > 4
    target = load_target(str(tiny_target_folder))
    for text in texts:
        alone = read_by(target, [((), tuple(text.tokens.tolist()))])[0].says
        assert text.says is not None
        assert alone is not None
        assert torch.equal(text.says, alone)  # its neighbours in a batch do not matter
    assert make(recipe(folder, tiny_target_folder), tmp_path / "data", read_manifest(tmp_path / "data")) == manifest


def test_a_killed_run_goes_on_behind_the_shards_that_are_there(
    folder: Path, tiny_target_folder: Path, tmp_path: Path
) -> None:
    settings = recipe(folder, tiny_target_folder)
    whole = make(settings, tmp_path / "whole")
    assert len(whole.texts) > 1
    (tmp_path / "killed").mkdir()
    first = read_shard(tmp_path / "whole", whole.texts[0])
    entry = write_shard(tmp_path / "killed", 0, first, kind="texts")
    stopped = DataManifest(recipe_sha256="", target="", prompts=0, texts=(entry,))
    assert make(settings, tmp_path / "killed", stopped) == whole


def test_a_text_answers_the_prompt_that_it_is_given(folder: Path, tiny_target_folder: Path, tmp_path: Path) -> None:
    bare = kept(tmp_path / "bare", make(recipe(folder, tiny_target_folder, count=2), tmp_path / "bare"))
    settings = recipe(folder, tiny_target_folder, count=2, prompt="Go on.")
    led = kept(tmp_path / "led", make(settings, tmp_path / "led"))
    assert [text.prompt_length for text in bare] == [1, 1]
    for text, plain in zip(led, bare, strict=True):
        assert text.prompt_length > 1
        assert torch.equal(text.tokens[text.prompt_length :], plain.tokens)


def test_a_block_counts_as_far_as_the_text_agrees_with_the_target() -> None:
    tokens = torch.tensor([1, 2, 3, 4, 5, 6])
    says = torch.tensor([2, 3, 9, 5, 6, 7])  # after 3 it would have said 9
    blocks = lay_out([tokens], [torch.tensor([0, 2, 3])], 4, says=[says])
    assert blocks.targets.tolist() == [[2, 3, 9], [9, 5, 6], [5, 6, 6]]
    assert blocks.valid.tolist() == [[True, True, True], [True, False, False], [True, True, False]]
    own = lay_out([tokens], [torch.tensor([0, 2, 3])], 4)
    agreed = lay_out([tokens], [torch.tensor([0, 2, 3])], 4, says=[torch.tensor([2, 3, 4, 5, 6, 0])])
    assert torch.equal(own.valid, agreed.valid)
    assert torch.equal(own.targets[own.valid], agreed.targets[own.valid])


def test_texts_are_trained_on_and_never_validated(tmp_path: Path) -> None:
    answers = [Example(i, torch.arange(9, dtype=torch.int32), 2) for i in range(20)]
    text = Example(-1, torch.arange(9, dtype=torch.int32), 1, torch.full((9,), 77, dtype=torch.int32))
    shards = (write_shard(tmp_path, 0, answers),), (write_shard(tmp_path, 0, [text], kind="texts"),)
    manifest = DataManifest(recipe_sha256="", target="", prompts=20, shards=shards[0], texts=shards[1])
    training, validation = load_answers(tmp_path, manifest, validation_share=0.5, seed=1)
    assert len(training) + len(validation) == 21
    assert sum(example.says is not None for example in training) == 1
    assert all(example.says is None for example in validation)
    assert seen_vocabulary(training).tolist() == [*range(2, 9), 77]


def test_near_copies_of_an_evaluation_are_found_and_likeness_is_not() -> None:
    excluded = Excluded([EXAM, "Who are you?"])
    words = EXAM.split()
    assert EXAM.lower().replace("?", "!") in excluded
    assert f"Please: {' '.join(words[: WINDOW + 1])}, he asked." in excluded
    assert "So, who ARE you, my friend?" in excluded
    assert "A farmer has twelve cows and sells three of them; how many are left after five weeks?" not in excluded
    assert "nobody knows " * 20 + "who are you" not in excluded  # three words in a long text are chance
    assert excluded.found == 3
