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


def test_settings_of_the_embedded_server_are_refused_for_other_engines(became: dict[str, Any]) -> None:
    error = serve("--target", "x", "--backend", "sglang", "--api-key-file", "keys", "--drain-seconds", "1")
    assert isinstance(error, UserError)
    assert "--api-key-file, --drain-seconds" in str(error)
    assert not became


def test_an_unknown_backend_is_refused_with_those_there_are() -> None:
    error = serve("--target", "x", "--backend", "nothing")
    assert isinstance(error, UserError)
    assert "torch" in str(error)


def dry_run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", "--dry-run", *arguments])
    assert result.exception is None
    return result.stdout


def test_a_dry_run_prints_the_command_and_writes_nothing(
    folders: tuple[Path, Path], tmp_path: Path, became: dict[str, Any]
) -> None:
    folder = tmp_path / "a folder"
    pair = ("--target", str(folders[0]), "--drafter", str(folders[1]))
    printed = dry_run(*pair, "--folder", str(folder), "--port", "9001", "--drain-seconds", "7")
    words = shlex.split(printed)
    assert {"DFLASH_SERVE_HTTP_PORT=9001", "DFLASH_SERVE_HTTP_DRAIN_SECONDS=7.0"} <= set(words)
    assert words[-3:] == ["-m", "dflash_torch.server", str(folder / "deployment.json")]
    assert not folder.exists()
    assert became == {}


def test_a_dry_run_prints_what_is_started(folders: tuple[Path, Path], tmp_path: Path, became: dict[str, Any]) -> None:
    arguments = ("--target", str(folders[0]), "--drafter", str(folders[1]), "--folder", str(tmp_path / "served"))
    printed = dry_run(*arguments)
    assert isinstance(serve(*arguments), Became)
    assert shlex.split(printed)[-len(became["argv"]) :] == list(became["argv"])


def test_a_dry_run_refuses_what_serving_would_refuse(folders: tuple[Path, Path]) -> None:
    error = serve("--dry-run", "--target", str(folders[0]), "--drafter", str(folders[1]), "--block-size", "99")
    assert isinstance(error, UserError)
    assert "larger than the drafter's" in str(error)
