"""Data is made once: deduplicated, free of excluded prompts, and a killed run goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.errors import UserError
from dflash_serve.models.loader import load_target, load_tokenizer
from dflash_serve.prompts import jsonl_prompts
from dflash_serve.training.answers import gather_prompts, make_data
from dflash_serve.training.contamination import Excluded
from dflash_serve.training.dataset import DataManifest, Example, read_manifest, read_shard
from dflash_serve.training.decoding import BatchDecoder, Completion
from dflash_serve.training.recipe import Recipe

TEXTS = [f"the quick brown fox {i}" for i in range(12)]
SECRET = "the lazy dog, an exam question"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in [*TEXTS, TEXTS[0], f"{SECRET}?"]))
    (tmp_path / "exam.jsonl").write_text(json.dumps({"prompt": SECRET}))
    return path


def recipe(prompts: Path, target: Path, **answering: Any) -> Recipe:
    sources = [
        {"kind": "file", "name": "foxes", "path": prompts},
        {"kind": "synthesised", "name": "own", "count": 3, "openers": ["fox", ""], "max_new_tokens": 12},
    ]
    settings = {"max_batch_size": 4, "max_new_tokens": 10, "shard_size": 5, **answering}
    return Recipe.model_validate(
        {
            "target": {"model": str(target)},
            "data": {"prompts": sources, "exclude": [str(prompts.parent / "exam.jsonl")], "answers": settings},
            "drafter": {"mask_token_id": 3},
            "training": {"steps": 1},
        }
    )


def make(settings: Recipe, folder: Path) -> DataManifest:
    name = settings.target.model
    return make_data(settings, load_target(name), load_tokenizer(name), folder, lambda *_: None)


def contents(manifest: DataManifest, folder: Path) -> dict[int, list[int]]:
    found: list[Example] = [answer for entry in manifest.shards for answer in read_shard(folder, entry)]
    return {answer.prompt_index: answer.tokens.tolist() for answer in found}


def test_every_prompt_is_answered_once_and_no_excluded_one(
    prompts: Path, tiny_target_folder: Path, tmp_path: Path
) -> None:
    manifest = make(recipe(prompts, tiny_target_folder), tmp_path / "data")
    assert manifest.finished
    assert manifest.excluded == 1
    tokenizer = load_tokenizer(str(tiny_target_folder))
    said = [tokenizer.decode(tokens) for tokens in contents(manifest, tmp_path / "data").values()]
    assert not any(SECRET in text for text in said)
    assert sum("quick brown fox" in text for text in said) <= len(TEXTS)
    assert sum(entry.answers for entry in manifest.shards) + manifest.dropped == manifest.prompts
    assert (tmp_path / "data" / "prompts-01-own.jsonl").read_text().count("\n") <= 3


def test_a_killed_run_goes_on_where_it_stopped(
    prompts: Path, tiny_target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = recipe(prompts, tiny_target_folder, sampled_share=0.0)
    whole = contents(make(settings, tmp_path / "whole"), tmp_path / "whole")
    decode = BatchDecoder.decode

    def killed(self: BatchDecoder, requests: Any) -> Iterator[Completion]:
        for count, completion in enumerate(decode(self, requests)):
            if count == 8:
                raise KeyboardInterrupt
            yield completion

    settings_folder = tmp_path / "killed"
    with monkeypatch.context() as patch:
        name = settings.target.model
        settings_folder.mkdir()
        nothing = Excluded([])
        gather_prompts(settings, load_target(name), load_tokenizer(name), settings_folder, nothing, lambda *_: None)
        patch.setattr(BatchDecoder, "decode", killed)
        with pytest.raises(KeyboardInterrupt):
            make(settings, settings_folder)
    kept = read_manifest(settings_folder)
    assert kept is not None
    assert [entry.answers for entry in kept.shards] == [5]
    assert not kept.finished
    assert contents(make(settings, settings_folder), settings_folder) == whole


def test_finished_data_is_found_and_other_data_refused(prompts: Path, tiny_target_folder: Path, tmp_path: Path) -> None:
    first = make(recipe(prompts, tiny_target_folder), tmp_path / "data")
    assert make(recipe(prompts, tiny_target_folder), tmp_path / "data") == first
    with pytest.raises(UserError, match="other target, data or seed"):
        make(recipe(prompts, tiny_target_folder, max_new_tokens=11), tmp_path / "data")


def test_more_minutes_go_on_where_fewer_ended(prompts: Path, tiny_target_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    short = recipe(prompts, tiny_target_folder, sampled_share=0.0, max_minutes=1e-9)
    first = make(short, folder)
    assert not first.finished
    assert make(short, folder) == first  # its minutes are spent
    assert make(recipe(prompts, tiny_target_folder, sampled_share=0.0, max_minutes=60), folder).finished
    whole = make(recipe(prompts, tiny_target_folder, sampled_share=0.0), tmp_path / "whole")
    assert contents(make(short, folder), folder) == contents(whole, tmp_path / "whole")


def test_a_line_that_is_no_prompt_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n{"question": "b"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"broken.jsonl:2"):
        jsonl_prompts(path)
