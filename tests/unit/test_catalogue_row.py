"""`python -m dflash_serve.catalogue_row` makes the row of a checkpoint, and names what no file of it tells."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dflash_serve.catalogue_row import main, row
from dflash_serve.checkpoint.catalogue import CataloguedDrafter
from dflash_serve.checkpoint.source import BUNDLED_DRAFTER

BUNDLED = ("--repository", "a/drafter", "--target", "Qwen/Qwen3-8B")


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["catalogue_row", *words])
    main()


def test_the_row_is_one_of_the_catalogue_and_the_rest_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call(monkeypatch, str(BUNDLED_DRAFTER), *BUNDLED)
    printed = capsys.readouterr()
    made = CataloguedDrafter.model_validate_json(printed.out)
    assert (made.kind, made.block_size, made.weights, made.licence, made.revision) == ("DFlash", 8, "bf16", None, None)
    assert {name: each.verdict for name, each in made.engines.items()} == dict.fromkeys(made.engines, "served")
    assert printed.err == (
        "to be added by hand, with its source: revision, licence, gated, thinking, target_precision, "
        "acceptance_length, source\n"
    )


def test_headers_alone_are_enough(tmp_path: Path) -> None:
    shutil.copy(BUNDLED_DRAFTER / "config.json", tmp_path)
    whole = (BUNDLED_DRAFTER / "model.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    (tmp_path / "model.safetensors").write_bytes(whole[: 8 + length])
    assert row(tmp_path, "a/b", "Qwen/Qwen3-8B") == row(BUNDLED_DRAFTER, "a/b", "Qwen/Qwen3-8B")
    assert (tmp_path / "model.safetensors").stat().st_size == 8 + length, "the files stay as they are"


def test_a_config_alone_gives_a_row_and_says_what_is_missing(tmp_path: Path) -> None:
    shutil.copy(BUNDLED_DRAFTER / "config.json", tmp_path)
    made, problems = row(tmp_path)
    assert (made.block_size, made.weights) == (8, None)
    assert any("no model.safetensors" in problem for problem in problems)


def test_what_is_not_read_has_its_reason_for_every_engine(tmp_path: Path) -> None:
    raw = json.loads((BUNDLED_DRAFTER / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shutil.copy(BUNDLED_DRAFTER / "model.safetensors", tmp_path)
    made, _ = row(tmp_path)
    assert made.weights == "pack-quantized"
    assert made.unread is not None
    assert {each.verdict for each in made.engines.values()} == {"refused"}
    assert all("compressed-tensors" in str(each.why) for each in made.engines.values())


def test_a_folder_without_a_drafter_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, str(tmp_path))
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert printed.err.startswith("catalogue_row: ")
    assert len(printed.err.splitlines()) == 1
