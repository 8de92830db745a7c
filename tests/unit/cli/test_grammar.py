"""One grammar for all verbs (docs/grammar.md): the same flags, help that fits a terminal, one line for a mistake."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import defaultdict
from inspect import signature
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest
import typer
from typer.testing import CliRunner

import dflash_serve
from dflash_serve.cli.main import app, run
from dflash_serve.common import extras
from dflash_serve.errors import UserError
from tests.support.tiny import tiny_drafter_config, write_tiny_drafter

GROUP: Any = typer.main.get_command(app)
VERBS = sorted(GROUP.commands)
OF_A_PAIR = ("serve", "verify", "doctor", "evaluate", "bench", "plan", "generate", "deploy")


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_json_and_quiet(verb: str) -> None:
    flags = {flag for parameter in GROUP.commands[verb].params for flag in parameter.opts}
    assert {"--json", "--quiet"} <= flags or verb == "top", "a console has --once --json"


@pytest.mark.parametrize("verb", OF_A_PAIR)
def test_every_verb_of_a_pair_takes_a_deployment(verb: str) -> None:
    assert "deployment" in {parameter.name for parameter in GROUP.commands[verb].params}


def test_one_flag_is_one_kind_of_value_in_every_verb() -> None:
    """`--prompts` is a file everywhere and `--num-prompts` a number; bench alone takes several `--concurrency`."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for command in app.registered_commands:
        function: Any = command.callback
        asked = signature(function, eval_str=True, globals=vars(sys.modules[function.__module__])).parameters
        for parameter in GROUP.commands[function.__name__].params:
            if parameter.name in asked:
                kind = (get_args(asked[parameter.name].annotation) or (asked[parameter.name].annotation,))[0]
                flags = (flag for flag in parameter.opts if flag.startswith("--"))
                named = sorted(str(one) for one in (get_args(kind) or (kind,)) if one is not NoneType)
                for flag in flags:
                    kinds[flag].add(" | ".join(named))
    assert {flag for flag, found in kinds.items() if len(found) > 1} == {"--concurrency"}
    assert "Path" in str(kinds["--prompts"])
    assert "int" in str(kinds["--num-prompts"])


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_80_columns_and_cuts_no_flag(verb: str, flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = invoke(verb, flag)
    assert told.exit_code == 0
    assert max(len(line) for line in told.stdout.splitlines()) <= 80
    for parameter in GROUP.commands[verb].params:
        for option in parameter.opts:
            if option.startswith("--"):
                assert re.search(rf"(?<![\w-]){option}(?![\w-])", told.stdout), option


def test_the_version_is_told() -> None:
    assert invoke("--version").stdout == f"dflash-serve {dflash_serve.__version__}\n"
    assert "--install-completion" in invoke("-h").stdout


@pytest.mark.parametrize("verb", ["serve", "verify", "bench", "deploy"])
def test_words_after_two_dashes_are_named_in_the_usage(verb: str) -> None:
    assert "[-- ENGINE ARGUMENTS]" in " ".join(invoke(verb, "-h").stdout.split())


BARE = {
    "inspect": ("inspect", "smollm2"),
    "convert": ("convert", "smollm2", "out", "--to", "zlab"),
    "train": ("train", "recipe.yaml"),
    "evaluate": ("evaluate", "--task", "humaneval"),
    "generate": ("generate", "hello"),
    "verify": ("verify",),
    "doctor": ("doctor",),
    "bench": ("bench",),
    "plan": ("plan",),
}


@pytest.mark.parametrize("verb", BARE)
def test_a_bare_install_names_the_extra(
    verb: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after `pip install dflash-serve` without an extra: nothing but its own requirements is there."""
    own = ("pydantic", "pydantic_settings", "yaml", "rich", "typer", "dflash_serve")
    monkeypatch.setattr(extras, "find_spec", lambda name: importlib.util.find_spec(name) if name in own else None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["dflash-serve", *BARE[verb]])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"dflash-serve: extra \[\w+\]: not installed: .*; pip install 'dflash-serve\[\w+\]'\n", said)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return write_tiny_drafter(tmp_path / "drafter", tiny_drafter_config())


def test_a_destination_that_cannot_be_written_is_one_line(drafter: Path) -> None:
    error = invoke("convert", str(drafter), "/proc/x", "--to", "speculators").exception
    assert isinstance(error, UserError)
    assert str(error).startswith("/proc/x: cannot be written")
    recipe = drafter.parent / "recipe.yaml"
    recipe.write_text("target: {model: smollm2}\ndata: {sources: []}\ndrafter: {}\ntraining: {}\n")
    error = invoke("train", str(Path("examples/training.yaml").resolve()), "--output", "/proc/x").exception
    assert isinstance(error, UserError)
    assert "/proc/x" in str(error)
    assert "cannot be written" in str(error)


def test_weights_are_as_readable_as_their_config(drafter: Path, tmp_path: Path) -> None:
    assert invoke("convert", str(drafter), str(tmp_path / "out"), "--to", "speculators").exit_code == 0
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert len(set(modes.values())) == 1, modes


def test_a_drafter_of_zeros_is_a_problem(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = write_tiny_drafter(tmp_path / "empty", tiny_drafter_config())
    file = folder / "model.safetensors"
    save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}, file)
    told = invoke("inspect", str(folder))
    assert told.exit_code == 1
    assert "nothing but zeros" in told.stdout


def test_a_rope_base_unlike_the_targets_is_noted(drafter: Path, tmp_path: Path) -> None:
    from dflash_serve.checkpoint.reader import read_config
    from dflash_serve.checkpoint.target import TargetShape
    from dflash_serve.deployment_checks import pairing_notes

    config, _ = read_config(drafter)
    target = TargetShape("t", "qwen3", 96, 32, 8, 128, rope_theta=config.rope.theta * 10)
    (note,) = pairing_notes(config, target)
    assert "RoPE base" in note
    assert pairing_notes(config, TargetShape("t", "qwen3", 96, 32, 8, 128, rope_theta=config.rope.theta)) == []


@pytest.mark.parametrize("words", [("inspect",), ("convert",)])
def test_a_revision_of_a_folder_is_refused_not_ignored(drafter: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    more = [str(tmp_path / "out"), "--to", "zlab"] if words == ("convert",) else []
    error = invoke(*words, str(drafter), *more, "--revision", "main").exception
    assert isinstance(error, UserError)
    assert "--revision" in str(error)
