"""`dflash-serve inspect` says what a drafter is and all that is wrong with it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dflash_serve.checkpoint.formats import Format
from dflash_serve.cli.checkpoints import inspect
from dflash_serve.errors import UserError
from tests.support.tiny import (
    FULL,
    SLIDING,
    edit_json,
    tiny_drafter_config,
    write_quantized_drafter,
    write_tiny_drafter,
)

app = typer.Typer()
app.command()(inspect)
runner = CliRunner()


def target(folder: Path, **sizes: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 8, "model_type": "llama", **sizes})
    )
    return folder


def test_it_describes_the_drafter(tmp_path: Path) -> None:
    config = tiny_drafter_config(layers=(SLIDING, FULL))
    folder = write_tiny_drafter(tmp_path / "drafter", config, dtype=torch.bfloat16)
    result = runner.invoke(app, [str(folder)])
    assert result.exit_code == 0
    for words in (
        "zlab",
        "4 (the anchor and 3 masked slots)",
        "token 7",
        "1, 3, 5 of 8",
        "window of 6, causal in the block",
        "full attention, bidirectional in the block",
        "4 heads, 2 K/V heads",
        "theta 10000",
        "no problems found",
    ):
        assert words in result.output


def test_json_has_the_config_the_sizes_and_the_problems(tmp_path: Path) -> None:
    config = tiny_drafter_config()
    folder = write_tiny_drafter(tmp_path / "drafter", config, dtype=torch.bfloat16, dialect="speculators")
    result = runner.invoke(app, [str(folder), "--json"])
    assert result.exit_code == 0
    report = json.loads(result.output)
    assert report["dialect"] == "speculators"
    assert report["config"] == config.model_dump(mode="json")
    assert report["bytes"] == 2 * report["parameters"]
    assert report["problems"] == []


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_a_sound_quantised_drafter_has_no_problems_and_says_how_it_is_quantised(format: Format, tmp_path: Path) -> None:
    folder = write_quantized_drafter(tmp_path / "drafter", format)
    result = runner.invoke(app, [str(folder)])
    assert result.exit_code == 0
    assert "no problems found" in result.output
    assert re.search(rf"quantisation +{format.upper()}; fc in bf16", result.output)
    report = json.loads(runner.invoke(app, [str(folder), "--json"]).output)
    assert report["quantization"] == {"format": format, "excluded": ["fc"], "kv_cache": None}
    plain = write_tiny_drafter(tmp_path / "plain", tiny_drafter_config(intermediate_size=64))
    assert report["parameters"] == json.loads(runner.invoke(app, [str(plain), "--json"]).output)["parameters"]


def test_it_finds_every_problem_and_exits_with_1(tmp_path: Path) -> None:
    folder = write_tiny_drafter(tmp_path / "drafter")
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"][0] = torch.nan
    tensors["extra"] = tensors.pop("fc.weight").clone()
    save_file(tensors, folder / "model.safetensors")
    result = runner.invoke(app, [str(folder)])
    assert result.exit_code == 1
    for words in (
        "tensor fc.weight [32, 96] is missing",
        "tensor extra [32, 96]",
        "norm.weight has 1 values that are NaN",
    ):
        assert words in result.output
    assert "no problems" not in result.output


def test_a_config_nobody_understands_is_a_problem_like_others(tmp_path: Path) -> None:
    folder = write_tiny_drafter(tmp_path / "drafter")
    edit_json(folder / "config.json", {"architectures": ["DFlash2DraftModel"]})
    result = runner.invoke(app, [str(folder), "--json"])
    assert result.exit_code == 1
    report = json.loads(result.output)
    assert report["config"] is None
    assert "DFlash2" in report["problems"][0]["what"]


@pytest.mark.parametrize(("sizes", "code"), [({}, 0), ({"num_hidden_layers": 4, "hidden_size": 64}, 1)])
def test_it_checks_the_drafter_against_a_target(sizes: dict[str, int], code: int, tmp_path: Path) -> None:
    folder = write_tiny_drafter(tmp_path / "drafter")
    result = runner.invoke(app, [str(folder), "--target", str(target(tmp_path / "target", **sizes))])
    assert result.exit_code == code
    if code:
        assert "hidden_size is 32, the target's is 64" in result.output
        assert "name [5]" in result.output


def test_no_folder_is_one_line(tmp_path: Path) -> None:
    result = runner.invoke(app, [str(tmp_path / "nothing")])
    assert isinstance(result.exception, UserError)
    assert "\n" not in str(result.exception)


def test_reading_the_weights_is_shown_on_a_terminal_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_drafter(tmp_path / "drafter")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    shown = runner.invoke(app, [str(folder)])
    assert "reading the weights" in shown.stderr
    assert "reading the weights" not in shown.stdout
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    assert "reading the weights" not in runner.invoke(app, [str(folder)]).stderr


def test_problems_with_the_bundled_target_name_it_and_not_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = target(tmp_path / "cache", num_hidden_layers=4, hidden_size=64)
    monkeypatch.setattr("dflash_serve.checkpoint.source.smollm2_folder", lambda: cache)
    result = runner.invoke(app, [str(write_tiny_drafter(tmp_path / "drafter")), "--target", "smollm2"])
    assert "drafter for smollm2: hidden_size is 32" in result.output
    assert str(cache) not in result.output


def test_a_dspark_drafter_is_described_with_its_rows(tmp_path: Path) -> None:
    heads = {"markov": {"kind": "gated", "rank": 6}, "slots": "anchor-first"}
    folder = write_tiny_drafter(tmp_path / "drafter", tiny_drafter_config(**heads), dialect="deepspec")
    result = runner.invoke(app, [str(folder)])
    assert result.exit_code == 0
    assert "DSpark: gated Markov head of rank 6, anchor-first slots" in result.output
    assert "4 (the anchor and 3 drafted slots; block_size 3 in config.json)" in result.output


def test_a_head_that_is_no_copy_of_the_targets_is_a_problem(tmp_path: Path) -> None:
    folder = write_tiny_drafter(tmp_path / "drafter", tiny_drafter_config(), dialect="deepspec")
    of = target(tmp_path / "target")
    head = torch.randn(96, 32)
    save_file({"model.embed_tokens.weight": head}, of / "model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": head.clone()}, folder / "model.safetensors")
    assert runner.invoke(app, [str(folder), "--target", str(of)]).exit_code == 0
    head[[4, 9]] *= 1.5
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors")
    result = runner.invoke(app, [str(folder), "--target", str(of)])
    assert result.exit_code == 1
    assert "2 of 96 rows of its lm_head are not the target's" in result.output
