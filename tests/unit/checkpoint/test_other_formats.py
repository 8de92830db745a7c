"""GPTQ, AWQ, MXFP8 and ModelOpt's mixtures: what their files stand for is computed number by number, and decoded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dflash_serve.adapter.registry import backend
from dflash_serve.adapter.verdicts import checkpoint_verdict
from dflash_serve.checkpoint.reader import load_tensors, open_checkpoint, stored_of
from dflash_serve.checkpoint.writer import write_drafter
from dflash_serve.cli.main import app
from dflash_serve.errors import UserError
from tests.support.other_formats import FORMATS, GPTQ, MIXED, write
from tests.support.tiny import edit_json, even_config, problems_of

SERVED_BY_VLLM = ("GPTQ", "GPTQ, 8 bits", "AWQ", "MXFP8", "MXFP8 of compressed-tensors")


@pytest.mark.parametrize("name", FORMATS)
def test_what_the_files_stand_for_is_what_is_decoded(name: str, tmp_path: Path) -> None:
    plain = write(name, tmp_path / "d", even_config())
    _, _, format, layout = FORMATS[name]
    checkpoint = open_checkpoint(tmp_path / "d")
    assert problems_of(tmp_path / "d") == []
    assert checkpoint.quantization is not None
    assert (checkpoint.quantization.format, checkpoint.quantization.layout) == (format, layout)
    assert (len(checkpoint.quantised), checkpoint.mislisted) == (14, [])
    read = load_tensors(checkpoint, torch.float32)
    assert all(torch.allclose(read[key], one.float(), rtol=1e-6) for key, one in plain.items())
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "d"), str(tmp_path / "out"), "--dequantise"])
    assert done.exit_code == 0, done.output
    written = load_file(tmp_path / "out" / "model.safetensors")
    for key, one in plain.items():
        expected = one.to(torch.bfloat16) if key.startswith("layers.") and key.endswith("_proj.weight") else one
        assert torch.equal(written[key], expected), key
    found = {engine: checkpoint_verdict(backend(engine), checkpoint, "qwen3") for engine in ("torch", "sglang", "vllm")}
    served = "served" if name in SERVED_BY_VLLM else "after convert"
    assert [one.verdict for one in found.values()] == ["served", "after convert", served], found  # sizes are no tiles
    after = open_checkpoint(tmp_path / "out")
    assert {checkpoint_verdict(backend(engine), after, "qwen3").verdict for engine in found} == {"served"}
    told = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path / "d"), "--json"]).output)
    assert told["parameters"] == sum(one.numel() for one in plain.values())


@pytest.mark.parametrize("name", [name for name in FORMATS if "GPTQ" in name or name == "AWQ"])
def test_whole_numbers_are_repacked_for_engines_without_a_change(name: str, tmp_path: Path) -> None:
    plain = write(name, tmp_path / "d", even_config())
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "d"), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "no value changed" in done.output
    checkpoint = open_checkpoint(tmp_path / "out")
    assert problems_of(tmp_path / "out") == []
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.layout == "compressed-tensors"
    read = load_tensors(checkpoint, torch.float32)
    assert all(torch.allclose(read[key], one.float(), rtol=1e-6) for key, one in plain.items())
    ordered = "by activations" in name
    verdict = checkpoint_verdict(backend("vllm"), checkpoint, "qwen3")
    assert verdict.verdict == ("after convert" if ordered else "served")
    assert ordered is ("vLLM reads no more" in str(verdict.why))


@pytest.mark.parametrize("name", ["MXFP8", "MXFP8 of compressed-tensors", "a mixture"])
def test_what_no_layout_takes_is_written_in_bf16_alone(name: str, tmp_path: Path) -> None:
    write(name, tmp_path / "d", even_config())
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "d"), str(tmp_path / "out")])
    assert isinstance(done.exception, UserError)
    assert "--dequantise writes it in bf16" in str(done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bits": 3}, "'gptq' with bits 3, group_size 32"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"dynamic": {"-:.*": {}}}, "rules by module (dynamic)"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv'"),
        ({**MIXED, "quantized_layers": {"layers.0.mlp.up_proj": {"quant_algo": "W4A8_AWQ"}}}, "with 'W4A8_AWQ'"),
    ],
)
def test_other_forms_are_one_line(change: dict[str, object], words: str, tmp_path: Path) -> None:
    write("GPTQ", tmp_path / "d", even_config())
    edit_json(tmp_path / "d" / "config.json", {"quantization_config": {**GPTQ, **change}})
    (problem,) = open_checkpoint(tmp_path / "d").problems
    assert words in problem.what
    assert "which is not read" in problem.what


@pytest.mark.parametrize("name", ["GPTQ", "AWQ"])
def test_products_in_bf16_beside_gptq_and_awq_need_the_conversion(name: str, tmp_path: Path) -> None:
    plain = write(name, tmp_path / "d", even_config())
    stored = load_file(tmp_path / "d" / "model.safetensors")
    module = "layers.1.mlp.down_proj"
    kept = {key: one for key, one in stored.items() if not key.startswith(f"{module}.")}
    save_file({**kept, f"{module}.weight": plain[f"{module}.weight"].float()}, tmp_path / "d" / "model.safetensors")
    found = checkpoint_verdict(backend("vllm"), open_checkpoint(tmp_path / "d"), "qwen3")
    assert found.verdict == "after convert"
    assert f"{module} is in bf16 beside {name}'s products" in str(found.why)
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "d"), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert checkpoint_verdict(backend("vllm"), open_checkpoint(tmp_path / "out"), "qwen3").verdict == "served"


@pytest.mark.parametrize("name", SERVED_BY_VLLM)
def test_a_drafter_written_again_in_its_layout_is_the_same(name: str, tmp_path: Path) -> None:
    """By `write_drafter`, which `serve` calls to hand it over."""
    plain = write(name, tmp_path / "d", even_config())
    checkpoint = open_checkpoint(tmp_path / "d")
    write_drafter(tmp_path / "out", even_config(), stored_of(checkpoint), quantised=checkpoint.quantised, behind=3)
    again = open_checkpoint(tmp_path / "out")
    assert (again.problems, again.mislisted, again.quantised) == ([], [], checkpoint.quantised)
    read = load_tensors(again, torch.float32)
    assert all(torch.allclose(read[key], one.float(), rtol=1e-6) for key, one in plain.items())
