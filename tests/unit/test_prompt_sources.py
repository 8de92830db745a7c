"""Prompts from files, from datasets as the hub keeps them, and the tasks of the paper's table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.answers import prompts
from dflash_serve.answers.groups import LabelledPrompt
from dflash_serve.answers.prompts import TASKS, hub_options, hub_prompts, jsonl_prompts, task_prompts
from dflash_serve.deployment.description import Model
from dflash_serve.errors import UserError
from dflash_serve.training.data import written_prompts
from dflash_serve.training.recipe import DatasetPrompts
from tests.support.paper_models import write_paper_target

TALK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello?"}]
ROWS = [
    {"question": "How many?", "turns": ["First", "Second"], "messages": TALK},
    {"question": " How far? ", "turns": ["Third"], "messages": TALK[:1]},
]


def text_of(asked: LabelledPrompt) -> str:
    """The one user turn of a task's prompt."""
    assert not isinstance(asked.prompt, str)
    (turn,) = asked.prompt
    assert isinstance(turn, Mapping)
    return turn["content"]


def test_a_context_has_room_for_prompts_and_answers_and_no_more_than_the_target_has() -> None:
    chat = [{"role": "user", "content": "a" * 100}]
    assert 100 + 20 < prompts.context_needed(Model(model="smollm2"), ["short", chat], 20) < 1000
    assert prompts.context_needed(Model(model="smollm2"), ["a" * 9000], 20) == 8192


def test_a_context_is_that_of_the_pinned_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the hub, `main` has gone on to another context than the commit that is served."""
    (refs := tmp_path / "models--a--target" / "refs").mkdir(parents=True)
    for name, commit, positions in (("v1", "0" * 40, 48), ("main", "1" * 40, 96)):
        snapshot = tmp_path / "models--a--target" / "snapshots" / commit
        write_paper_target(snapshot, max_position_embeddings=positions)
        (refs / name).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for revision, positions in ((None, 96), ("v1", 48)):
        assert prompts.context_needed(Model(model="a/target", revision=revision), ["a" * 9000], 20) == positions


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder in the form of a repository on the hub, read by the real package."""
    config = pytest.importorskip("datasets").config
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(tmp_path / "repository")


def test_a_column_of_texts_of_turns_or_of_conversations_gives_first_user_turns(dataset: str) -> None:
    assert hub_prompts(dataset, split="train", where="x") == ["How many?", "How far?"]
    assert hub_prompts(dataset, split="train", column="turns", where="x") == ["First", "Third"]
    assert hub_prompts(dataset, split="train", column="messages", where="x") == ["Hello?"]


def test_a_dataset_that_is_not_what_was_thought_is_one_clear_line(dataset: str) -> None:
    with pytest.raises(UserError, match=r"x: no prompts in it; name another column; it has question, turns, messages"):
        hub_prompts(dataset, split="train", column="prompt", where="x")
    with pytest.raises(UserError, match=r"x: cannot be loaded \(.*test"):
        hub_prompts(dataset, where="x")
    with pytest.raises(UserError, match="unknown option 'revision'"):
        hub_options("hf:openai/gsm8k,revision=1", "x")


def test_a_training_recipe_takes_prompts_from_a_dataset(dataset: str) -> None:
    source = DatasetPrompts(kind="dataset", name="hub", dataset=dataset, templates=("Q: {prompt}",), count=1)
    assert written_prompts(source) == ["Q: How many?"]


def test_a_task_of_the_papers_table_is_asked_in_its_wording(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def hub(repository: str, **options: Any) -> list[str]:
        asked.append((repository, options.get("subset"), options["column"]))
        return ["1 + 1 = {?}"]

    monkeypatch.setattr(prompts, "hub_prompts", hub)
    name, (labelled,) = task_prompts("gsm8k", {})
    prompt = text_of(labelled)
    assert (name, asked) == ("gsm8k", [("openai/gsm8k", "main", "question")])
    assert prompt == "1 + 1 = {?}\nPlease reason step by step, and put your final answer within \\boxed{}."
    for known in TASKS:
        assert task_prompts(known, {})[0] == known


def test_a_task_of_ones_own_is_a_file_or_a_dataset(dataset: str, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Why?"}\n\n')
    mine, hub = f"mine={tmp_path / 'mine.jsonl'}", f"hub=hf:{dataset},split=train,column=turns"
    for source, texts in ((mine, ["Why?"]), (hub, ["First", "Third"])):
        name, prompts = task_prompts(source, {})
        assert (name, [text_of(one) for one in prompts]) == (source.partition("=")[0], texts)
        assert {one.task for one in prompts} == {name}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("not json", r"mine.jsonl:1: not \{"),
        ('{"text": "Why?"}', "mine.jsonl:1: not"),
        ('{"prompt": " "}', ":1: not"),
        ("[1]", ":1: not"),
        ("", "no prompts in it"),
    ],
)
def test_a_file_without_prompts_is_one_clear_line(line: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(line)
    with pytest.raises(UserError, match=says):
        jsonl_prompts(tmp_path / "mine.jsonl")
