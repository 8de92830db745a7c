"""`dflash-serve convert` changes the words and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from dflash_serve.checkpoint.reader import DIALECTS, read_config
from dflash_serve.cli.checkpoints import To, convert
from dflash_serve.errors import UserError
from dflash_serve.models.loader import load_drafter
from tests.support.tiny import FULL, SLIDING, tiny_drafter_config, write_tiny_drafter

app = typer.Typer()
app.command()(convert)
runner = CliRunner()


def test_every_dialect_is_offered() -> None:
    assert {to.value for to in To} == set(DIALECTS)


@pytest.mark.parametrize("to", [to for to in To if to is not To.specforge])
def test_the_drafter_stays_the_same(to: To, tmp_path: Path) -> None:
    source = write_tiny_drafter(tmp_path / "a", dtype=torch.bfloat16)
    result = runner.invoke(app, [str(source), str(tmp_path / "b"), "--to", to.value, "--json"])
    assert result.exit_code == 0
    report = json.loads(result.output)
    assert (report["from"], report["to"], report["tensors"]) == ("zlab", to.value, 25)
    assert read_config(tmp_path / "b") == (tiny_drafter_config(), to.value)
    before, after = load_drafter(source).state_dict(), load_drafter(tmp_path / "b").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_target_is_named_and_gives_the_depth_that_zlabs_code_needs(tmp_path: Path) -> None:
    source = write_tiny_drafter(tmp_path / "a", tiny_drafter_config(num_target_layers=None))
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 8}))
    plain = runner.invoke(app, [str(source), str(tmp_path / "b"), "--to", "zlab"])
    assert "num_target_layers is not known" in plain.output
    known = runner.invoke(app, [str(source), str(tmp_path / "c"), "--to", "zlab", "--target", str(target)])
    assert "note" not in known.output
    assert read_config(tmp_path / "c")[0].num_target_layers == 8
    runner.invoke(app, [str(source), str(tmp_path / "d"), "--to", "speculators", "--target", str(target)])
    written = json.loads((tmp_path / "d" / "config.json").read_text())
    assert written["speculators_config"]["verifier"]["name_or_path"] == str(target)


def test_a_drafter_that_vllm_would_misread_in_speculators_words_is_not_written_without_a_word(tmp_path: Path) -> None:
    source = write_tiny_drafter(tmp_path / "a", tiny_drafter_config(layers=(FULL, SLIDING)))
    result = runner.invoke(app, [str(source), str(tmp_path / "b"), "--to", "speculators"])
    assert "note: vLLM 0.32 and 0.33 would make every layer causal" in result.output


def test_a_drafter_is_not_named_after_a_target_it_does_not_fit(tmp_path: Path) -> None:
    source, target = write_tiny_drafter(tmp_path / "a"), tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 9}))
    result = runner.invoke(app, [str(source), str(tmp_path / "b"), "--to", "zlab", "--target", str(target)])
    assert isinstance(result.exception, UserError)
    assert not (tmp_path / "b").exists()


def test_a_destination_is_kept_unless_given_up(tmp_path: Path) -> None:
    source, taken = write_tiny_drafter(tmp_path / "a"), write_tiny_drafter(tmp_path / "b", dialect="modelopt")
    result = runner.invoke(app, [str(source), str(taken), "--to", "speculators"])
    assert isinstance(result.exception, UserError)
    assert read_config(taken)[1] == "modelopt"
    assert runner.invoke(app, [str(source), str(taken), "--to", "speculators", "--overwrite"]).exit_code == 0
    assert read_config(taken)[1] == "speculators"


def test_a_drafter_can_be_converted_in_place(tmp_path: Path) -> None:
    folder = write_tiny_drafter(tmp_path / "a", dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in load_drafter(folder).state_dict().items()}
    assert runner.invoke(app, [str(folder), str(folder), "--to", "speculators", "--overwrite"]).exit_code == 0
    after = load_drafter(folder).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_bad_drafter_is_not_converted(tmp_path: Path) -> None:
    source = write_tiny_drafter(tmp_path / "a")
    (source / "model.safetensors").unlink()
    result = runner.invoke(app, [str(source), str(tmp_path / "b"), "--to", "zlab"])
    assert isinstance(result.exception, UserError)
    assert not (tmp_path / "b").exists()
