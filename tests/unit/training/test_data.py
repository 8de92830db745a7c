"""Data is made once: deduplicated, free of excluded prompts, and a killed run goes on where it stopped."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dflash_serve import LLM
from dflash_serve.answers.engine import Chunk
from dflash_serve.errors import UserError
from dflash_serve.models.kv_cache import Span
from dflash_serve.models.loader import load_target, load_tokenizer
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.training import data
from dflash_serve.training.answers import AnswerRequest, ask, repeated_tail
from dflash_serve.training.data import (
    WINDOW,
    Excluded,
    answer_engine,
    make_data,
)
from dflash_serve.training.loss import SlotLoss, Weighting
from dflash_serve.training.recipe import TrainingRecipe
from dflash_serve.training.shards import (
    DataManifest,
    Example,
    read_manifest,
    read_shard,
    seen_vocabulary,
    write_manifest,
    write_shard,
)
from dflash_serve.training.trainer import target_features
from dflash_torch.model_runner import TargetRunner
from tests.support.recipes import tiny_recipe

TEXTS = [f"the quick brown fox {i}" for i in range(12)]
SECRET = "the lazy dog, an exam question"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in [*TEXTS, TEXTS[0], f"{SECRET}?"]))
    (tmp_path / "exam.jsonl").write_text(json.dumps({"prompt": SECRET}))
    return path


def recipe(prompts: Path, target: Path, **answering: Any) -> TrainingRecipe:
    """Prompts of a file, and three that the target makes up."""
    fields = tiny_recipe(str(target), prompts).model_dump()
    own = {"kind": "synthesised", "name": "own", "count": 3, "openers": ["fox", ""], "max_new_tokens": 12}
    sources = [*fields["data"]["prompts"], own]
    fields["data"] |= {"prompts": sources, "exclude": [str(prompts.parent / "exam.jsonl")]}
    fields["data"]["answers"] |= {"max_batch_size": 4, "max_new_tokens": 10, "shard_size": 5, **answering}
    return TrainingRecipe.model_validate(fields)


def make(settings: TrainingRecipe, folder: Path) -> DataManifest:
    return make_data(settings, lambda: answer_engine(settings, "cpu"), folder, lambda *_: None)


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


def test_a_killed_run_goes_on_where_it_stopped(prompts: Path, tiny_target_folder: Path, tmp_path: Path) -> None:
    settings, folder = recipe(prompts, tiny_target_folder, sampled_share=0.5), tmp_path / "killed"
    whole = contents(make(settings, tmp_path / "whole"), tmp_path / "whole")

    def killed(what: str, _count: int) -> None:
        if what == "answers":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_data(settings, lambda: answer_engine(settings, "cpu"), folder, killed)
    kept = read_manifest(folder)
    assert kept is not None
    assert [entry.answers for entry in kept.shards] == [5]
    assert not kept.finished
    assert contents(make(settings, folder), folder) == whole


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


def test_the_time_that_prompts_take_counts(
    prompts: Path, tiny_target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a target that makes up its prompts slowly leaves no time for the training behind the answers."""
    clock, gather = [0.0], data.gather_prompts

    def slowly(*args: Any) -> list[tuple[int, ...]]:
        clock[0] += 3600
        return gather(*args)

    monkeypatch.setattr(data, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(data, "gather_prompts", slowly)
    short = recipe(prompts, tiny_target_folder, max_minutes=30)
    first = make(short, tmp_path / "data")
    assert (first.shards, first.finished, first.seconds) == ((), False, 3600)
    assert make(short, tmp_path / "data") == first
    assert make(recipe(prompts, tiny_target_folder, max_minutes=600), tmp_path / "data").finished


ASKED = [[5, 6, 7], [9], [30, 31, 32, 33, 34, 35, 36], [12, 13], [60, 61, 62, 63], [7] * 9, [80, 90, 100]]


@pytest.mark.parametrize("at_once", [1, 3, 16])
def test_answers_do_not_depend_on_how_many_are_asked_at_once(tiny_target_folder: Path, at_once: int) -> None:
    llm = LLM(str(tiny_target_folder), dtype="float32", max_batch_size=16)
    params = [SamplingParams(temperature=t, seed=n, max_tokens=12) for n, t in enumerate([0, 0, 0, 0, 1, 1, 1])]
    requests = [AnswerRequest(n, tuple(prompt), params[n]) for n, prompt in enumerate(ASKED)]
    found = {one.request.index: one for one in ask(llm.engine, iter(requests), at_once)}
    for index, output in enumerate(llm.generate(ASKED, params)):
        assert found[index].tokens == output.token_ids
        assert found[index].ended == (output.finish_reason == "stop")


class Looping:
    """A stream that says the same three tokens over and over."""

    closed = False

    def __next__(self) -> Chunk:
        self.said = getattr(self, "said", 0) + 1
        return Chunk(0, "", [self.said % 3])

    def close(self) -> None:
        self.closed = True


def test_an_answer_that_loops_is_cut_and_its_request_ended() -> None:
    stream = Looping()
    engine = Mock(stream=lambda prompts, params: stream)
    (found,) = ask(engine, iter([AnswerRequest(0, (5,), SamplingParams())]), 4)
    assert found.looped
    assert not found.ended
    assert stream.closed
    assert len(found.tokens) == 32 - 2 * 3  # found at the second check


@pytest.mark.parametrize("period", [1, 2, 5, 24])
def test_a_loop_is_found_with_its_period(period: int) -> None:
    assert repeated_tail([500, 501, *list(range(period)) * 30]) == period


def test_three_repeats_and_short_or_varied_answers_are_no_loop() -> None:
    numbers = random.Random(0)
    assert repeated_tail([*range(100, 160), *list(range(10)) * 3]) == 0
    assert repeated_tail([1] * 23) == 0
    assert repeated_tail([numbers.randrange(50) for _ in range(300)]) == 0


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
