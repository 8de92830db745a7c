"""One grammar for all verbs (docs/grammar.md): the same flags, help that fits a terminal, one line for a mistake."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
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
from dflash_serve.certify.report import EXIT_CODES as CERTIFY
from dflash_serve.cli.grammar import VERDICTS
from dflash_serve.cli.main import app, run
from dflash_serve.common import extras
from dflash_serve.doctor.diagnosis import Verdict
from dflash_serve.verify.report import EXIT_CODES as VERIFY
from tests.support.paper_models import write_paper_drafter, write_paper_target

GROUP: Any = typer.main.get_command(app)
VERBS = sorted(GROUP.commands)
OF_A_PAIR = ("serve", "verify", "doctor", "evaluate", "bench", "certify", "plan", "generate", "deploy", "adapt")


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

    bench and certify alone take several `--concurrency`, bench several `--url`, and certify's `--compare` two reports.
    """
    kinds: dict[str, set[str]] = defaultdict(set)
    for command in GROUP.commands.values():
        function: Any = command.callback.__wrapped__
        asked = signature(function, eval_str=True, globals=vars(sys.modules[function.__module__])).parameters
        for parameter in GROUP.commands[function.__name__].params:
            if parameter.name in asked:
                kind = (get_args(asked[parameter.name].annotation) or (asked[parameter.name].annotation,))[0]
                flags = (flag for flag in parameter.opts if flag.startswith("--"))
                named = sorted(str(one) for one in (get_args(kind) or (kind,)) if one is not NoneType)
                for flag in flags:
                    kinds[flag].add(" | ".join(named))
    assert {flag for flag, found in kinds.items() if len(found) > 1} == {"--concurrency", "--compare", "--url"}
    assert "Path" in str(kinds["--prompts"])
    assert "int" in str(kinds["--num-prompts"])


def options_of(verb: str) -> dict[str, Any]:
    return {option: parameter for parameter in GROUP.commands[verb].params for option in parameter.opts}


RUNNING = ("Address of a running server", "Running server")


def test_a_running_server_is_named_by_url_in_every_verb() -> None:
    named = {
        verb: [one.opts for one in GROUP.commands[verb].params if (one.help or "").startswith(RUNNING)]
        for verb in VERBS
    }
    assert {verb: found for verb, found in named.items() if found} == {
        "bench": [["--url"]],
        "certify": [["--url"]],
        "doctor": [["--url"]],
        "top": [["--url"]],
        "verify": [["--url"]],
    }
    with_metrics = [verb for verb in VERBS if "--metrics-url" in options_of(verb)]
    assert with_metrics == ["bench", "certify", "doctor", "top", "verify"]
    assert {options_of(verb)["--metrics-url"].multiple for verb in with_metrics} == {True}


@pytest.mark.parametrize("verb", VERBS)
def test_shared_options_are_of_one_form(verb: str) -> None:
    options = options_of(verb)
    flags = [option for option in ("--json", "--quiet", "--resume", "--dry-run") if option in options]
    assert [option for option in flags if not options[option].is_flag] == []
    assert ("--quiet" in options) == ("-q" in options)
    if "--output" in options:
        assert options["--output"].help.startswith(("File ", "Folder "))


def test_exit_codes_are_those_of_the_page_and_of_the_help() -> None:
    given = {"verify": {*VERIFY.values()}, "certify": {*CERTIFY.values()}, "doctor": {one.exit_code for one in Verdict}}
    assert {verb: {0, *VERDICTS[verb]} for verb in given} == given
    assert {*VERDICTS} <= {*VERBS}
    for verb in VERBS:
        told = " ".join(invoke(verb, "--help").stdout.split()).partition("Exit codes: ")[2]
        assert re.findall(r"(?:^|; )(\d+) ", told) == [str(code) for code in sorted({0, 2, *VERDICTS.get(verb, {})})]


OLD = [
    (
        ("verify", "--with", "http://a@b"),
        "--with is --url now",
        "b: an address must not carry a password",
    ),
    (
        ("verify", "--without=http://a"),
        "--without is --without-url now",
        "verify: a server with speculation is verified; give --url, too",
    ),
    (
        ("bench", "--endpoint", "a=http://b", "--drafter", "c"),
        "--endpoint is --url now",
        "--drafter: no server is started",
    ),
    (
        ("top", "http://a@b", "--once"),
        "give the address as --url http://a@b",
        "b: an address must not carry a password",
    ),
    (("top", "--interval", "9", "http://a@b"), "give the address as --url http://a@b", "b: an address must not carry"),
]


@pytest.mark.parametrize(("words", "now", "then"), OLD, ids=[" ".join(words) for words, _, _ in OLD])
def test_names_of_the_release_before_are_understood_for_one_more(
    words: tuple[str, ...], now: str, then: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["dflash-serve", *words])
    with pytest.raises(SystemExit) as ended:
        run()
    said = capsys.readouterr().err.splitlines()
    assert (ended.value.code, said[0]) == (2, f"dflash-serve: {now}; the old form will be gone in 0.4")
    assert said[1].startswith(f"dflash-serve: {then}")


HERE = ("--target", "{target}", "--drafter", "{drafter}")
JSON = {
    "drafters": ("drafters", "Qwen/Qwen3-8B"),
    "inspect": ("inspect", "smollm2"),
    "convert": ("convert", "smollm2", "{place}/out", "--to", "zlab"),
    "serve --dry-run": ("serve", *HERE, "--dry-run", "--backend", "sglang"),
    "plan": ("plan", *HERE, "--gpu", "h100", "--isl", "64", "--osl", "64", "--output", "{place}/plan"),
    "deploy": ("deploy", "{place}/deployment.yaml", "--render", "helm", "--backend", "torch"),
    "build --dry-run": ("build", "smollm2", "--dry-run"),
}


@pytest.mark.parametrize("case", JSON)
def test_json_is_all_that_stands_on_stdout(case: str, tmp_path: Path) -> None:
    target, drafter = write_paper_target(tmp_path / "target"), write_paper_drafter(tmp_path / "drafter")
    described = f"target: {{model: {target}}}\ndrafter: {{model: {drafter}}}\n"
    (tmp_path / "deployment.yaml").write_text(described)
    words = [word.format(target=target, drafter=drafter, place=tmp_path) for word in JSON[case]]
    told = invoke(*words, "--json")
    assert told.exit_code == 0, told.output
    json.loads(told.stdout)


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
    "convert": ("convert", "smollm2", "out", "--to", "zlab"),
    "train": ("train", "recipe.yaml"),
    "evaluate": ("evaluate", "--task", "humaneval"),
    "generate": ("generate", "hello"),
    "verify": ("verify",),
    "doctor": ("doctor",),
    "bench": ("bench",),
}


@pytest.mark.parametrize("verb", BARE)
def test_a_bare_install_names_the_extra(
    verb: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after `pip install dflash-serve` without an extra: nothing but its own requirements is there."""
    own = (
        "huggingface_hub",
        "numpy",
        "pydantic",
        "pydantic_settings",
        "safetensors",
        "yaml",
        "rich",
        "typer",
        "dflash_serve",
    )
    monkeypatch.setattr(extras, "find_spec", lambda name: importlib.util.find_spec(name) if name in own else None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["dflash-serve", *BARE[verb]])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"dflash-serve: extra \[\w+\]: not installed: .*; pip install 'dflash-serve\[\w+\]'\n", said)
    assert list(tmp_path.iterdir()) == []


def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The line on stderr of a command that is refused."""
    monkeypatch.setattr("sys.argv", ["dflash-serve", *words])
    with pytest.raises(SystemExit) as ended:
        run()
    told = capsys.readouterr()
    assert (ended.value.code, told.out, told.err.count("\n")) == (2, "", 1)
    return told.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("serve", "x.yaml", "--port", "99999"), "Invalid value for '--port'.*; see `dflash-serve serve --help`"),
        (("verify", "--samples", "many"), "Invalid value for '--samples'.*; see `dflash-serve verify --help`"),
        (("serve", "--wdith", "3"), "No such option:? '?--wdith.*--width.*; see `dflash-serve serve --help`"),
        (("convert", "a"), "Missing argument.*; see `dflash-serve convert --help`"),
        (("frob",), "No such command 'frob'.*; see `dflash-serve --help`"),
        (("bench", "x.yaml", "--temperature", "-1"), "Invalid value for '--temperature'.*"),
        (("evaluate", "--task", "a=b", "--temperature", "3"), "Invalid value for '--temperature'.*"),
        (("top", "--url", "http://a", "--interval", "inf"), "--interval: inf is no finite number"),
        (("certify", "x.yaml", "--minutes", "inf"), "--minutes: inf is no finite number"),
        (("bench", "x.yaml", "--interactivity", "inf"), "--interactivity: inf is no finite number"),
        (("inspect", "~nobody-of-this-name/drafter"), "~nobody-of-this-name/drafter: no such folder.*"),
    ],
)
def test_a_wrong_word_is_one_line(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.fullmatch(f"dflash-serve: {said}\n", say(monkeypatch, capsys, *words))


def test_no_word_at_all_is_answered_with_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["dflash-serve"])
    with pytest.raises(SystemExit):
        run()
    told = capsys.readouterr()
    assert "Usage: dflash-serve" in told.out + told.err


SERVERS = ("--url", "http://127.0.0.1:9", "--without-url", "http://127.0.0.1:9")
IGNORED = [
    (("convert", "a", "b", "--to", "zlab", "--markov-rank", "16"), "--markov-rank", "give --markov-head, too"),
    (("serve", "x.yaml", "--json"), "--json", "add --dry-run"),
    (("serve", "x.yaml", "--show-files"), "--show-files", "add --dry-run"),
    (("serve", "x.yaml", "--backend", "sglang", "--drain-seconds", "4"), "--drain-seconds", "with --backend torch"),
    (("serve", "x.yaml", "--backend", "vllm", "--acceptance-metrics", "none"), "--acceptance-metrics", "torch"),
    (("generate", "hello", "--top-p", "0.9"), "--top-p", "give --temperature, too"),
    (("generate", "hello", "--top-k", "9"), "--top-k", "give --temperature, too"),
    (("generate", "hello", "--width", "off", "--compare"), "--compare", "does not speculate"),
    (("verify", "x.yaml", *SERVERS), "DEPLOYMENT", "running servers have their own"),
    (("verify", *SERVERS, "--backend", "torch"), "--backend", "running servers have their own"),
    (("verify", *SERVERS, "--width", "4"), "--width", "running servers have their own"),
    (("verify", *SERVERS, "--", "--a", "1"), "--", "running servers have their own arguments"),
    (("verify", "--model", "a"), "--model", "give --url, too"),
    (("verify", "--api-key-file", "a"), "--api-key-file", "give --url, too"),
    (("verify", "--concurrency", "3"), "--concurrency", "no server is asked"),
    (("doctor", "--model", "a"), "--model", "give --url, too"),
    (("doctor", "--api-key-file", "a"), "--api-key-file", "give --url, too"),
    (("bench", "--url", "a=http://b", "--variants", "off"), "--variants", "no server is started"),
    (("bench", "--url", "a=http://b", "--drafter", "c"), "--drafter", "no server is started"),
    (("bench", "--url", "a=http://b", "--", "--c", "1"), "--", "no server is started"),
    (("bench", "x.yaml", "--api-key-file", "a"), "--api-key-file", "need no key"),
    (("certify", "--compare", "a.json", "b.json", "--minutes", "3"), "--minutes", "nothing is run"),
    (("deploy", "x.yaml", "--backend", "torch", "--prepare", "a", "--image", "b"), "--image", "nothing is rendered"),
]


@pytest.mark.parametrize(("words", "where", "why"), IGNORED, ids=[" ".join(words) for words, _, _ in IGNORED])
def test_an_option_without_an_effect_is_refused(
    words: tuple[str, ...], where: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = say(monkeypatch, capsys, *words)
    assert said.startswith(f"dflash-serve: {where}: ")
    assert why in said


def test_a_dry_run_of_a_training_refuses_a_device_that_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = say(monkeypatch, capsys, "train", "recipe.yaml", "--dry-run", "--device", "tpu")
    assert said == "dflash-serve: --device: no device 'tpu'; use auto, cpu, cuda or cuda:N\n"


def test_a_target_of_the_environment_is_not_replaced_by_the_bundled_pair(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASH_SERVE_TARGET__MODEL", "/nowhere")
    assert "/nowhere" in say(monkeypatch, capsys, "generate", "hello", "--quiet")


@pytest.mark.parametrize("verb", ["serve", "verify", "certify"])
def test_an_engine_that_is_not_installed_is_refused_before_anything_is_written(
    verb: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = write_paper_target(tmp_path / "target"), write_paper_drafter(tmp_path / "drafter")
    monkeypatch.setattr("dflash_serve.common.processes.find_spec", lambda _: None)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words = (verb, "--target", str(target), "--drafter", str(drafter), "--backend", "sglang")
    said = say(monkeypatch, capsys, *words)
    assert said.startswith("dflash-serve: sglang: not installed in this environment")
    assert said.endswith("or look at it with `serve --dry-run`\n")
    assert list((tmp_path / "here").iterdir()) == []


def test_the_help_has_the_first_sentence_of_every_verb() -> None:
    told = " ".join(invoke("--help").stdout.split())
    for verb in VERBS:
        sentence = GROUP.commands[verb].help.split("\n")[0].split(". ")[0].rstrip(".")
        assert f" {verb} {sentence}." in told


def test_help_needs_no_folder_for_temporary_files() -> None:
    """As in a container whose file system is read-only."""
    no_folder = "import tempfile; tempfile._candidate_tempdir_list = lambda: ['/nowhere']"
    start = f"{no_folder}; from dflash_serve.cli.main import run; run()"
    done = subprocess.run([sys.executable, "-c", start, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_user_without_a_home_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def home(_: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", classmethod(home))
    assert "set HOME or XDG_CACHE_HOME" in say(monkeypatch, capsys, "generate", "hello", "--quiet")
