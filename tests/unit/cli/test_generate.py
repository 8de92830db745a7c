"""`generate`: what it prints, and one clear line with exit code 2 for everything a user can get wrong."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_serve.cli.main import run
from tests.support.tiny import edit_json, tiny_drafter_config, write_tiny_drafter
from tests.support.tiny_target import write_tiny_pair

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def target(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> Path:
    capsys.readouterr()  # transformers' own progress bars from writing the files
    return pair[0]


@pytest.fixture
def drafter(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair[1], tmp_path / "drafter"))


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dflash-serve", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            run()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return call


def test_it_streams_and_says_what_speculation_was_worth(cli: Cli, target: Path, drafter: Path) -> None:
    given = ("--target", target, "--drafter", drafter, "--max-tokens", 20, "--width", 4)
    code, out, _ = cli("generate", "2 + 2 = ?", *given, "--compare")
    assert code == 0
    assert "acceptance length τ" in out
    assert "survival by slot" in out
    assert "identical tokens" in out
    widths = [int(width) for width in re.findall(r"(\d+): \d+", out.split("x steps:")[1].splitlines()[0])]
    assert len(widths) > 1  # the last steps are narrower
    assert widths == sorted(widths)


def test_json_has_every_figure_and_unknown_ones_are_null(cli: Cli, target: Path, drafter: Path) -> None:
    given = ("--target", target, "--drafter", drafter, "--max-tokens", 8, "--width", "off", "--json")
    code, out, _ = cli("generate", "hello", *given)
    report = json.loads(out)
    assert code == 0
    assert report["acceptance_length"] is None
    assert report["tokens"] <= 8


def test_block_size_and_width_may_be_smaller_than_the_drafters(cli: Cli, target: Path, drafter: Path) -> None:
    given = ("--target", target, "--drafter", drafter, "--max-tokens", 12, "--json")
    texts = [
        json.loads(cli("generate", "abc", *given, *flags)[1])["text"]
        for flags in (["--width", "off"], ["--width", 2], ["--block-size", 3, "--width", 3], ["--width", "auto"])
    ]
    assert len(set(texts)) == 1


BAD: dict[str, tuple[list[str], list[str]]] = {
    "no such target": (["--target", "nowhere/at/all"], ["nowhere/at/all", "no such folder"]),
    "block size 0": (["--block-size", "0"], ["block_size", "greater than or equal to 2"]),
    "block larger than the drafter's": (["--block-size", "9"], ["block_size 9", "4"]),
    "width larger than the block": (["--width", "7"], ["width 7", "4"]),
    "width that is no width": (["--width", "wide"], ["width", "auto", "off"]),
    "negative temperature": (["--temperature", "-1"], ["temperature"]),
    "unknown dtype": (["--dtype", "int3"], ["dtype"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_flag_is_one_clear_line(cli: Cli, target: Path, drafter: Path, case: str) -> None:
    flags, words = BAD[case]
    expect_one_line(cli("generate", "hi", "--target", target, "--drafter", drafter, *flags), *words)


def expect_one_line(result: tuple[int, str, str], *words: str) -> None:
    code, out, err = result
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2, (out, err)
    assert len(lines) == 1, err
    assert lines[0].startswith("dflash-serve: ")
    for word in words:
        assert word in lines[0]


def test_a_folder_that_holds_no_drafter(cli: Cli, target: Path, tmp_path: Path) -> None:
    result = cli("generate", "hi", "--target", target, "--drafter", tmp_path)
    expect_one_line(result, "no config.json", str(tmp_path))


def test_truncated_weights(cli: Cli, target: Path, drafter: Path) -> None:
    weights = drafter / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    expect_one_line(cli("generate", "hi", "--target", target, "--drafter", drafter), "model.safetensors")


def test_fc_of_another_width(cli: Cli, target: Path, drafter: Path) -> None:
    edit_json(drafter / "config.json", {"dflash_config.target_layer_ids": [0, 1, 2]})
    expect_one_line(cli("generate", "hi", "--target", target, "--drafter", drafter), "fc.weight", "64", "96")


def test_an_unknown_dialect(cli: Cli, target: Path, drafter: Path) -> None:
    edit_json(drafter / "config.json", {"architectures": ["SomethingElse"], "model_type": "other"})
    expect_one_line(cli("generate", "hi", "--target", target, "--drafter", drafter), "SomethingElse")


def test_a_prompt_longer_than_the_model(cli: Cli, target: Path, drafter: Path) -> None:
    result = cli("generate", "x" * 300, "--target", target, "--drafter", drafter, "--raw")
    expect_one_line(result, "prompt", "300 tokens", "256")


def test_a_target_of_another_vocabulary(cli: Cli, target: Path, tmp_path: Path) -> None:
    other = write_tiny_drafter(tmp_path / "other", tiny_drafter_config(vocab_size=64))
    expect_one_line(cli("generate", "hi", "--target", target, "--drafter", other), "vocab_size is 64")


def test_a_truncated_target(cli: Cli, target: Path, tmp_path: Path, drafter: Path) -> None:
    broken = Path(shutil.copytree(target, tmp_path / "broken"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    expect_one_line(cli("generate", "hi", "--target", broken, "--drafter", drafter), "model.safetensors")
