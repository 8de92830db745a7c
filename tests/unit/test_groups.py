"""Acceptance by groups: context length by the step, language and thinking by the prompt's line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_serve.answers.engine import template_variables
from dflash_serve.answers.groups import Dimension, LabelledPrompt, grouped, length_range
from dflash_serve.answers.prompts import labelled_prompts
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import total
from tests.support.command_line import call
from tests.support.embedded import answers, tiny_engine


@pytest.mark.parametrize(
    ("tokens", "name"), [(0, "0-127"), (127, "0-127"), (128, "128-255"), (255, "128-255"), (2048, "2048-4095")]
)
def test_ranges_of_context_lengths_end_at_powers_of_two(tokens: int, name: str) -> None:
    assert length_range(tokens) == name


def test_a_step_counts_where_its_context_is_and_no_step_is_lost(pair: tuple[Path, Path]) -> None:
    """The drafter is right three times of four, and the second prompt's answer crosses 128 tokens."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [[5 + n % 80 for n in range(length)] for length in (20, 100, 150)]
    plain = answers(tiny_engine(pair, width=1), prompts, params)
    truth = {tuple(prompt): output.token_ids for prompt, output in zip(prompts, plain, strict=True)}
    outputs = answers(tiny_engine(pair, width=4, truth=truth), prompts, params)
    assert [one.token_ids for one in outputs] == [one.token_ids for one in plain]
    found = grouped([LabelledPrompt(prompt) for prompt in prompts], outputs, Dimension.length)
    assert {name: sorted(counts) for name, counts in found.items()} == {"0-127": [0, 1], "128-255": [1, 2]}
    for number, output in enumerate(outputs):
        parts = total(counts[number] for counts in found.values() if number in counts)
        assert (parts.steps, parts.accepted) == (output.statistics.steps, output.statistics.accepted)
    # The pass over 100 tokens gave the 101st, whose step's context is 100; steps below 128 end at 128 or later.
    gained = found["0-127"][1].tokens
    assert gained is not None
    assert 128 - 100 <= gained < 128 - 100 + 4


def test_the_fields_of_a_line_are_its_groups_and_reach_the_template(tmp_path: Path) -> None:
    lines = [
        {"prompt": "Warum?", "language": "DE", "thinking": False},
        {"messages": [{"role": "user", "content": "Why?"}], "chat_template_kwargs": {"thinking": True}},
        {"prompt": "Pourquoi ?", "language": "fr"},
        {"prompt": "Why?", "task": "maths"},
    ]
    (path := tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = labelled_prompts(path, task="mine")
    assert [(one.language, one.thinking) for one in found[:3]] == [("de", "off"), ("unknown", "on"), ("fr", "unknown")]
    assert [one.task for one in found] == ["mine", "mine", "mine", "maths"]
    variables = [template_variables(one.prompt) for one in found]
    assert variables == [{"enable_thinking": False}, {"thinking": True}, {}, {}]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"prompt": "x", "language": 7}, "language is no text"),
        ({"prompt": "x", "thinking": "yes"}, "thinking is not true or false"),
        ({"prompt": "x", "chat_template_kwargs": []}, "chat_template_kwargs is no object"),
        ({"token_ids": [1], "thinking": True}, "no chat template writes it"),
    ],
)
def test_a_field_of_another_kind_is_an_error_that_names_the_line(
    line: dict[str, object], said: str, tmp_path: Path
) -> None:
    (path := tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "fine"}) + "\n" + json.dumps(line))
    with pytest.raises(UserError, match=said) as error:
        labelled_prompts(path, task="mine")
    assert "p.jsonl:2" in str(error.value)


def test_evaluate_reports_every_group(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"prompt": "the fox", "language": "en", "thinking": True}, {"prompt": "a dog", "thinking": False}]
    (path := tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ("--task", f"mine={path}", "--target", pair[0], "--drafter", pair[1], "--max-tokens", 12, "--width", 4)
    quick = ("--speed", 0, "--no-controls")
    output = tmp_path / "report.json"
    by = ("--by", "length,language,thinking", "--output", output)
    assert call(monkeypatch, "evaluate", *given, *quick, *by) == 0
    report = json.loads(output.read_text())
    assert {name: list(groups) for name, groups in report["by"].items()} == {
        "length": ["0-127"],
        "language": ["en", "unknown"],
        "thinking": ["off", "on"],
    }
    whole = report["tasks"]["mine"]["as it is"]
    assert report["by"]["length"]["0-127"] == whole, "all steps are there, and only once"
    for groups in report["by"].values():
        assert sum(row["steps"] for row in groups.values()) == whole["steps"]
    assert "context tokens" in capsys.readouterr().out
    assert call(monkeypatch, "evaluate", *given, *quick, "--json") == 0
    assert "by" not in json.loads(capsys.readouterr().out), "nothing was asked for"


def test_an_unknown_group_is_one_line(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "evaluate", "--task", "x=none.jsonl", "--by", "length,langage") == 2
    assert "'langage' is no group" in (said := capsys.readouterr().err)
    assert "language" in said
