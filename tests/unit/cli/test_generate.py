"""`generate`: what it prints, and one clear line with exit code 2 for everything a user can get wrong."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_serve.answers import evaluation
from dflash_serve.answers.engine import Engine, Prompt
from dflash_serve.answers.evaluation import TimedRun
from dflash_serve.speculation.params import SamplingParams
from tests.support.command_line import call
from tests.support.tiny import edit_json, tiny_drafter_config, write_tiny_drafter

WEIGHTS = "model.safetensors"


@pytest.fixture
def ask(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Asks the pair; later flags beat the ones that name it. Returns exit code, stdout and stderr."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    capsys.readouterr()  # transformers' own progress bars from writing the files

    def asked(prompt: str, *flags: object) -> tuple[int, str, str]:
        code = call(monkeypatch, "generate", prompt, "--target", pair[0], "--drafter", pair[1], *flags)
        return code, *capsys.readouterr()

    return asked


Ask = Callable[..., tuple[int, str, str]]


def test_it_streams_and_says_what_speculation_was_worth(ask: Ask) -> None:
    code, out, _ = ask("2 + 2 = ?", "--max-tokens", 20, "--width", 4, "--compare")
    assert code == 0
    assert [word for word in ("acceptance length τ", "survival by slot", "identical tokens") if word not in out] == []
    widths = [int(width) for width in re.findall(r"(\d+): \d+", out.split("x steps:")[1].splitlines()[0])]
    assert len(widths) > 1  # the last steps are narrower
    assert widths == sorted(widths)


def test_no_block_size_or_width_changes_the_answer_and_json_has_null_for_unknown_figures(ask: Ask) -> None:
    reports = []
    for flags in (("--width", "off"), ("--width", 2), ("--block-size", 3, "--width", 3), ("--width", "auto")):
        code, out, _ = ask("abc", "--max-tokens", 12, "--json", *flags)
        assert code == 0
        reports.append(json.loads(out))
    assert len({report["text"] for report in reports}) == 1
    assert reports[0]["acceptance_length"] is None
    assert reports[0]["tokens"] <= 12


def expect_one_line(told: tuple[int, str, str], *words: str) -> None:
    code, out, err = told
    (line,) = (line for line in err.splitlines() if line.strip())
    assert code == 2, (out, err)
    assert line.startswith("dflash-serve: ")
    assert [word for word in words if word not in line] == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--target", "nowhere/at/all"), ("nowhere/at/all", "no such folder")),
        (("--block-size", "0"), ("block_size", "greater than or equal to 2")),
        (("--block-size", "9"), ("block_size 9", "4")),
        (("--width", "7"), ("width 7", "4")),
        (("--width", "wide"), ("width", "auto", "off")),
        (("--temperature", "-1"), ("temperature",)),
        (("--dtype", "int3"), ("dtype",)),
        (("x" * 300, "--raw"), ("prompt", "300 tokens", "256")),
    ],
)
def test_a_bad_flag_or_prompt_is_one_clear_line(ask: Ask, flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    expect_one_line(ask(*flags) if len(flags[0]) == 300 else ask("hi", *flags), *words)


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:1000])


def another_vocabulary(folder: Path) -> None:
    shutil.rmtree(folder)
    write_tiny_drafter(folder, tiny_drafter_config(vocab_size=64))


def infinite_logits(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 3e38)  # finite, but not its product
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("model", "fault", "words"),
    [
        ("drafter", lambda folder: (folder / "config.json").unlink(), ("no config.json", "{folder}")),
        ("drafter", cut, (WEIGHTS,)),
        (
            "drafter",
            lambda folder: edit_json(folder / "config.json", {"dflash_config.target_layer_ids": [0, 1, 2]}),
            ("fc.weight", "64", "96"),
        ),
        (
            "drafter",
            lambda folder: edit_json(folder / "config.json", {"architectures": ["Other"], "model_type": "other"}),
            ("Other",),
        ),
        ("drafter", another_vocabulary, ("vocab_size is 64",)),
        ("target", cut, (WEIGHTS,)),
        ("target", infinite_logits, ("the target's logits are NaN or infinite",)),
    ],
)
def test_a_broken_model_is_one_clear_line(
    ask: Ask,
    pair: tuple[Path, Path],
    tmp_path: Path,
    model: str,
    fault: Callable[[Path], None],
    words: tuple[str, ...],
) -> None:
    folder = Path(shutil.copytree(pair[model == "drafter"], tmp_path / "broken"))
    fault(folder)
    told = ask("hi", f"--{model}", folder, "--raw", "--dtype", "float32", "--width", 4)
    expect_one_line(told, *(word.format(folder=folder) for word in words))


def test_thinking_is_a_variable_of_the_template_and_part_of_the_report(ask: Ask) -> None:
    code, out, _ = ask("fox", "--max-tokens", 4, "--json", "--chat-template-kwargs", '{"enable_thinking": false}')
    assert (code, json.loads(out)["chat_template_kwargs"]) == (0, {"enable_thinking": False})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--chat-template-kwargs", "thinking"), "not a JSON object"),
        (("--chat-template-kwargs", "[1]"), "not a JSON object"),
        (("--chat-template-kwargs", '{"enable_thinkin": 1}'), "does not read 'enable_thinkin'"),
        (("--chat-template-kwargs", '{"if": 1}'), "does not read 'if'"),
        (("--chat-template-kwargs", '{"enable_thinking": 1}', "--raw"), "no chat template writes it"),
    ],
)
def test_variables_that_no_template_reads_are_one_line(ask: Ask, flags: tuple[str, ...], says: str) -> None:
    code, out, err = ask("fox", "--max-tokens", 4, *flags)
    assert (code, out) == (2, "")
    assert says in err


def test_an_answer_is_printed_as_it_is(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tabs, brackets and the names of emoji, too."""
    text, really = "if x:\n\ta[b] = ':smile:' [bold]c[/bold]", evaluation.time_run

    def saying(engine: Engine, prompt: Prompt, params: SamplingParams, show: Callable[[str], None]) -> TimedRun:
        show(text)
        return really(engine, prompt, params)

    monkeypatch.setattr("dflash_serve.cli.answers.time_run", saying)
    assert ask("hi", "--max-tokens", 4, "--quiet")[1] == f"{text}\n\n"
