from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dflash_serve.cli.main import app
from dflash_serve.errors import UserError
from dflash_torch import launch
from tests.support.tiny_target import write_tiny_pair


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tiny_pair(tmp_path_factory.mktemp("pair"))


class Became(Exception):  # noqa: N818 - nothing went wrong
    """The process would be another one now."""


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def execvpe(file: str, argv: tuple[str, ...], env: dict[str, str]) -> None:
        seen.update(file=file, argv=argv, env=env)
        raise Became

    monkeypatch.setattr(os, "execvpe", execvpe)
    return seen


def serve(*arguments: str) -> BaseException | None:
    return CliRunner().invoke(app, ["serve", *arguments]).exception


def test_it_becomes_the_embedded_server_of_the_merged_deployment(
    folders: tuple[Path, Path], tmp_path: Path, became: dict[str, Any]
) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(f"target: {{model: {folders[0]}}}\nspeculation: {{width: auto}}\nlimits: {{max_batch_size: 2}}\n")
    error = serve(str(file), "--drafter", str(folders[1]), "--width", "3", "--port", "9001", "--drain-seconds", "7")
    assert isinstance(error, Became)
    assert became["argv"][1:3] == ("-m", "dflash_torch.server")
    written = json.loads(Path(became["argv"][3]).read_text())
    assert written["target"]["model"] == str(folders[0])
    assert written["drafter"]["model"] == str(folders[1])
    assert (written["speculation"]["width"], written["limits"]["max_batch_size"]) == (3, 2)
    http = {key: value for key, value in became["env"].items() if key.startswith("DFLASH_SERVE_HTTP_")}
    assert http == {
        "DFLASH_SERVE_HTTP_HOST": "127.0.0.1",
        "DFLASH_SERVE_HTTP_PORT": "9001",
        "DFLASH_SERVE_HTTP_DRAIN_SECONDS": "7.0",
    }


def test_a_mistake_is_found_before_anything_is_replaced(folders: tuple[Path, Path], became: dict[str, Any]) -> None:
    error = serve("--target", str(folders[0]), "--drafter", str(folders[1]), "--width", "9")
    assert isinstance(error, UserError)
    assert "width 9" in str(error)
    assert not became


def test_settings_of_the_embedded_server_are_refused_for_other_engines(
    folders: tuple[Path, Path], became: dict[str, Any]
) -> None:
    pair = ("--target", str(folders[0]), "--drafter", str(folders[1]))
    error = serve(*pair, "--backend", "sglang", "--drain-seconds", "1")
    assert isinstance(error, UserError)
    assert "engine_args.sglang.drain-seconds: SGLang 0.5.23 has no such argument" in str(error)
    assert not became


def test_an_unknown_backend_is_refused_with_those_there_are() -> None:
    for name, said in (
        ("nothing", "installed are: sglang, tensorrt-llm, torch, vllm"),
        ("sglng", "did you mean sglang?"),
    ):
        error = serve("--target", "x", "--backend", name)
        assert isinstance(error, UserError)
        assert said in str(error)


def dry_run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", "--dry-run", *arguments])
    assert result.exception is None, result.output
    return result.stdout


def test_a_dry_run_prints_the_command_and_writes_nothing(
    folders: tuple[Path, Path], tmp_path: Path, became: dict[str, Any]
) -> None:
    folder = tmp_path / "a folder"
    pair = ("--target", str(folders[0]), "--drafter", str(folders[1]))
    printed = dry_run(*pair, "--folder", str(folder), "--port", "9001", "--drain-seconds", "7", "--quiet")
    words = shlex.split(printed)
    assert {"DFLASH_SERVE_HTTP_PORT=9001", "DFLASH_SERVE_HTTP_DRAIN_SECONDS=7.0"} <= set(words)
    assert words[-3:] == ["-m", "dflash_torch.server", str(folder / "deployment.json")]
    assert not folder.exists()
    assert became == {}


def test_a_dry_run_prints_what_is_started(folders: tuple[Path, Path], tmp_path: Path, became: dict[str, Any]) -> None:
    arguments = ("--target", str(folders[0]), "--drafter", str(folders[1]), "--folder", str(tmp_path / "served"))
    printed = dry_run(*arguments, "--quiet")
    assert isinstance(serve(*arguments), Became)
    assert shlex.split(printed)[-len(became["argv"]) :] == list(became["argv"])


def test_a_dry_run_refuses_what_serving_would_refuse(folders: tuple[Path, Path]) -> None:
    bad = ("--target", str(folders[0]), "--drafter", str(folders[1]), "--block-size", "99", "--width", "100")
    printed = CliRunner().invoke(app, ["serve", "--dry-run", *bad])
    assert printed.exit_code == 2
    assert "larger than the drafter's" in printed.stdout
    assert "width 100 is larger than the block" in printed.stdout, "every problem, not the first"


def test_words_after_two_dashes_are_the_engines_own(folders: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(f"target: {{model: {folders[0]}}}\nengine_args: {{sglang: {{stream-interval: 2}}}}")
    words = dry_run(str(file), "--backend", "sglang", "--quiet", "--", "--mem-fraction-static", "0.9", "--enable-lora")
    assert "--stream-interval 2 --mem-fraction-static 0.9 --enable-lora --host" in words
    pair = ("--target", str(folders[0]), "--drafter", str(folders[1]))
    words = dry_run(*pair, "--backend", "torch", "--quiet", "--", "--drain-seconds", "5")
    assert "DFLASH_SERVE_HTTP_DRAIN_SECONDS=5" in words, "without a file, too"


def test_what_clients_see_is_a_key_of_the_deployment(folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    file = tmp_path / "deployment.yaml"
    serving = f"{{served_model_name: mine, api_key_file: {tmp_path / 'keys'}}}"
    file.write_text(f"target: {{model: {folders[0]}}}\nserving: {serving}")
    words = shlex.split(dry_run(str(file), "--quiet"))
    assert {"DFLASH_SERVE_HTTP_SERVED_MODEL_NAME=mine", f"DFLASH_SERVE_HTTP_API_KEY_FILE={tmp_path / 'keys'}"} <= set(
        words
    )
    words = shlex.split(dry_run(str(file), "--quiet", "--served-model-name", "yours"))
    assert "DFLASH_SERVE_HTTP_SERVED_MODEL_NAME=yours" in words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--acceptance-metrics", "bogus"), "engine_args.torch: acceptance_metrics: Input should be"),
        (("--drain-seconds", "-1"), "engine_args.torch: drain_seconds: Input should be"),
        (("--api-key-file", "/nowhere"), "serving.api_key_file: /nowhere cannot be read"),
        (("--", "--max-bodi-bytes", "1"), "did you mean max-body-bytes?"),
        (("--", "--port", "1"), "--port of `dflash-serve serve`"),
    ],
)
def test_a_dry_run_lets_no_bad_value_through(folders: tuple[Path, Path], words: tuple[str, ...], said: str) -> None:
    arguments = ["serve", "--dry-run", "--target", str(folders[0]), "--drafter", str(folders[1]), *words]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert said in result.stdout


def test_the_embedded_engine_takes_as_many_requests_as_memory_holds(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, became: dict[str, Any]
) -> None:
    pair = ("--target", str(folders[0]), "--drafter", str(folders[1]))
    told = {}
    for free in (10**12, 2 * 10**6):
        monkeypatch.setattr(launch, "free_bytes", lambda free=free: free)
        report = json.loads(dry_run(*pair, "--json"))
        told[free] = next(one for one in report["chosen"] if one["key"] == "limits.max_batch_size")
    assert told[10**12]["value"] == "32"
    assert 1 <= int(told[2 * 10**6]["value"]) < 32
    assert "free memory holds" in told[10**12]["why"]
    result = CliRunner().invoke(app, ["serve", *pair, "--folder", str(tmp_path / "served")])
    assert isinstance(result.exception, Became)
    assert f"limits.max_batch_size = {told[2 * 10**6]['value']}" in result.stderr, "the command says it, too"
    written = json.loads((tmp_path / "served" / "deployment.json").read_text())
    assert str(written["limits"]["max_batch_size"]) == told[2 * 10**6]["value"]


def test_an_engine_that_is_not_installed_is_one_line(folders: tuple[Path, Path], tmp_path: Path) -> None:
    pair = ("--target", str(folders[0]), "--backend", "sglang", "--folder", str(tmp_path / "served"))
    error = serve(*pair)
    assert isinstance(error, UserError)
    assert "sglang: not installed in this environment" in str(error)
    assert not (tmp_path / "served").exists(), "said before anything is written"
