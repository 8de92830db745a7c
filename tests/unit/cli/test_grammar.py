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

GROUP: Any = typer.main.get_command(app)
VERBS = sorted(GROUP.commands)
OF_A_PAIR = ("serve", "verify", "doctor", "evaluate", "bench", "certify", "plan", "generate", "deploy")


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
    """`--prompts` is a file everywhere and `--num-prompts` a number.

    bench and certify alone take several `--concurrency`, and certify's `--compare` takes two reports.
    """
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
    assert {flag for flag, found in kinds.items() if len(found) > 1} == {"--concurrency", "--compare"}
    assert "Path" in str(kinds["--prompts"])
    assert "int" in str(kinds["--num-prompts"])


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_80_columns_and_cuts_no_flag(verb: str, flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = invoke(verb, flag)
    assert told.exit_code == 0
    assert max(len(line) for line in told.stdout.splitlines()) <= 80
    takes = "[-- ENGINE ARGUMENTS]" in " ".join(told.stdout.split())
    assert takes is (verb in ("serve", "verify", "bench", "certify", "deploy"))
    for parameter in GROUP.commands[verb].params:
        for option in parameter.opts:
            if option.startswith("--"):
                assert re.search(rf"(?<![\w-]){option}(?![\w-])", told.stdout), option


def test_the_version_is_told() -> None:
    assert invoke("--version").stdout == f"dflash-serve {dflash_serve.__version__}\n"
    assert "--install-completion" in invoke("-h").stdout


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
