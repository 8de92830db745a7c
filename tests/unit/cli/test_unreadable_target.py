"""Each command that computes with a target refuses one that it cannot read: one line, exit code 2, no answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from dflash_serve import LLM, UserError
from tests.support.command_line import call
from tests.support.quantised_target import write_quantised_target

Arguments = Callable[[Path, Path, Path], tuple[object, ...]]


@pytest.fixture(scope="module")
def quantised(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quantised_target(pair[0], tmp_path_factory.mktemp("fp8") / "target", "FP8 by block")


def prompts(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "the fox"}) + "\n")
    return path


def trained(target: Path, drafter: Path, folder: Path) -> tuple[object, ...]:
    recipe = {
        "target": {"model": str(target)},
        "data": {"prompts": [{"kind": "file", "name": "foxes", "path": str(prompts(folder))}]},
        "drafter": {"num_layers": 1, "block_size": 4, "mask_token_id": 3, "target_layer_ids": [0, 2]},
        "training": {"steps": 2},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return "train", folder / "recipe.yaml", "--output", folder / "out"


COMMANDS: dict[str, Arguments] = {
    "serve": lambda t, d, _: ("serve", "--target", t, "--drafter", d),
    "serve --dry-run": lambda t, d, _: ("serve", "--target", t, "--drafter", d, "--dry-run", "--quiet"),
    "generate": lambda t, d, _: ("generate", "hello", "--target", t, "--drafter", d, "--raw"),
    "generate without a drafter": lambda t, _, __: ("generate", "hello", "--target", t, "--raw"),
    "evaluate": lambda t, d, f: ("evaluate", "--task", f"mine={prompts(f)}", "--target", t, "--drafter", d),
    "verify": lambda t, d, f: ("verify", "--target", t, "--drafter", d, "--output", f / "report.json"),
    "train": trained,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_quantised_target_is_one_line_and_exit_code_2(
    command: str,
    pair: tuple[Path, Path],
    quantised: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("os.execvpe", Mock(side_effect=AssertionError("a server was started")))
    arguments = COMMANDS[command](quantised, pair[1], tmp_path)
    capfd.readouterr()
    assert call(monkeypatch, *arguments) == 2
    told = capfd.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert f"{quantised}: the target is quantised (FP8 by block; its recipe says fp8)" in line


def test_so_does_the_python_api(pair: tuple[Path, Path], quantised: Path) -> None:
    with pytest.raises(UserError, match="the target is quantised"):
        LLM(str(quantised), str(pair[1]))
