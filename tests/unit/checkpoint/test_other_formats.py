"""GPTQ, AWQ, MXFP8 and ModelOpt's mixtures: what their files stand for is computed number by number, and decoded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from dflash_serve.adapter.registry import backend
from dflash_serve.adapter.verdicts import checkpoint_verdict
from dflash_serve.checkpoint.reader import load_tensors, open_checkpoint
from dflash_serve.cli.main import app
from dflash_serve.errors import UserError
from tests.support.tiny import edit_json, even_config, problems_of, random_tensors, write_tiny_drafter

GROUP = 32
Stored = tuple[dict[str, Tensor], Tensor]  # (tensors of a module, the weight [out, in] that they stand for)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def numbers(*shape: int, below: int, seed: int = 0) -> list[list[int]]:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed)).tolist()


def as_int32(words: list[list[int]]) -> Tensor:
    return torch.tensor([[word - 2**32 if word >= 2**31 else word for word in row] for row in words], dtype=torch.int32)


def turned(
    rows: int, columns: int, *, bits: int, places: list[int] | None, less_one: bool, symmetric: bool, desc_act: bool
) -> Stored:
    """GPTQ's (`places` None: neighbouring inputs share a word) or AWQ's (number `places[i]` is i-th in a word)."""
    each, groups = 32 // bits, columns // GROUP
    values = numbers(columns, rows, below=2**bits)
    zeros = [[2 ** (bits - 1)] * rows] * groups if symmetric else numbers(groups, rows, below=2**bits - 1, seed=1)
    zeros = [[zero + less_one for zero in row] for row in zeros] if not symmetric else zeros
    scales = torch.rand(groups, rows, generator=torch.Generator().manual_seed(2)).half() / 8 + 0.01
    group_of = [index // GROUP for index in range(columns)]
    group_of = group_of[::-1] if desc_act else group_of
    order = places or list(range(each))

    def packed_by_rows(table: list[list[int]], shift: int) -> list[list[int]]:
        words = [[0] * (rows // each) for _ in table]
        for line, row in enumerate(table):
            for word in range(rows // each):
                for place in range(each):
                    words[line][word] |= (row[word * each + order[place]] - shift) << (bits * place)
        return words

    if places is None:
        words = [[0] * rows for _ in range(columns // each)]
        for index in range(columns):
            for row in range(rows):
                words[index // each][row] |= values[index][row] << (bits * (index % each))
    else:
        words = packed_by_rows(values, 0)
    stored = {"qweight": as_int32(words), "qzeros": as_int32(packed_by_rows(zeros, int(less_one))), "scales": scales}
    if places is None:
        stored["g_idx"] = torch.tensor(group_of, dtype=torch.int32)
    step = scales.double().tolist()
    weight = [
        [(values[index][row] - zeros[group_of[index]][row]) * step[group_of[index]][row] for index in range(columns)]
        for row in range(rows)
    ]
    return stored, torch.tensor(weight)


def gptq(rows: int, columns: int, **more: Any) -> Stored:
    given: dict[str, Any] = {"bits": 4, "less_one": True, "symmetric": True, "desc_act": False}
    return turned(rows, columns, places=None, **{**given, **more})


def awq(rows: int, columns: int) -> Stored:
    places = [0, 2, 4, 6, 1, 3, 5, 7]
    return turned(rows, columns, bits=4, places=places, less_one=False, symmetric=False, desc_act=False)


def mxfp8(rows: int, columns: int) -> Stored:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).to(torch.float8_e4m3fn)
    exponents = numbers(rows, columns // 32, below=9, seed=4)
    scale = torch.tensor(exponents, dtype=torch.uint8) + 120
    plain = values.double().tolist()
    weight = [[plain[r][c] * 2.0 ** (exponents[r][c // 32] + 120 - 127) for c in range(columns)] for r in range(rows)]
    return {"weight": values, "weight_scale": scale}, torch.tensor(weight)


def fp8(rows: int, columns: int) -> Stored:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(5)).to(torch.float8_e4m3fn)
    return {
        "weight": values,
        "weight_scale": torch.tensor(0.03),
        "input_scale": torch.tensor(0.5),
    }, values.float() * 0.03


def nvfp4(rows: int, columns: int) -> Stored:
    codes = numbers(rows, columns, below=16, seed=6)
    packed = [[row[c] | row[c + 1] << 4 for c in range(0, columns, 2)] for row in codes]
    scale = (torch.rand(rows, columns // 16, generator=torch.Generator().manual_seed(7)) + 0.5).to(torch.float8_e4m3fn)
    steps = scale.double().tolist()
    weight = [
        [
            (-1 if row[c] > 7 else 1) * E2M1[row[c] % 8] * steps[r][c // 16] * float(torch.tensor(0.02))
            for c in range(columns)
        ]
        for r, row in enumerate(codes)
    ]
    tensors = {"weight": torch.tensor(packed, dtype=torch.uint8), "weight_scale": scale}
    return {**tensors, "weight_scale_2": torch.tensor(0.02), "input_scale": torch.tensor(0.1)}, torch.tensor(weight)


GPTQ: Mapping[str, object] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
MIXED: Mapping[str, object] = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        f"model.layers.{layer}.{module}": {"quant_algo": algorithm}
        for layer in range(2)
        for module, algorithm in (
            *((f"self_attn.{part}_proj", "FP8") for part in "qkvo"),
            *((f"mlp.{part}_proj", "NVFP4") for part in ("gate", "up", "down")),
        )
    },
}
FORMATS: Mapping[str, tuple[Mapping[str, object], Callable[[str, int, int], Stored], str, str]] = {
    "GPTQ": (GPTQ, lambda _, rows, columns: gptq(rows, columns), "w4a16", "gptq"),
    "GPTQ, 8 bits": ({**GPTQ, "bits": 8}, lambda _, rows, columns: gptq(rows, columns, bits=8), "w8a16", "gptq"),
    "GPTQ by activations, with zero points": (
        {**GPTQ, "sym": False, "desc_act": True},
        lambda _, rows, columns: gptq(rows, columns, symmetric=False, desc_act=True),
        *("w4a16", "gptq"),
    ),
    "GPTQ's second form": (
        {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
        lambda _, rows, columns: gptq(rows, columns, symmetric=False, less_one=False),
        *("w4a16", "gptq"),
    ),
    "AWQ": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        lambda _, rows, columns: awq(rows, columns),
        *("w4a16", "awq"),
    ),
    "MXFP8": (
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "exclude_modules": ["fc"]},
        lambda _, rows, columns: mxfp8(rows, columns),
        *("mxfp8", "modelopt"),
    ),
    "a mixture": (
        MIXED,
        lambda name, rows, columns: (fp8 if ".self_attn." in name else nvfp4)(rows, columns),
        *("mixed", "modelopt"),
    ),
}


def write(name: str, folder: Path) -> dict[str, Tensor]:
    """Writes a drafter in a format; returns the numbers of every tensor."""
    recipe, store, _, _ = FORMATS[name]
    config = even_config()
    write_tiny_drafter(folder, config)
    kept, plain = dict[str, Tensor](), random_tensors(config)
    for key, tensor in random_tensors(config).items():
        module = key.removesuffix(".weight")
        if not (key.startswith("layers.") and key.endswith("_proj.weight")):
            kept[key] = tensor
            continue
        tensors, plain[key] = store(module, *tensor.shape)
        kept |= {f"{module}.{leaf}": one.clone() for leaf, one in tensors.items()}
    save_file(kept, folder / "model.safetensors")
    edit_json(folder / "config.json", {"quantization_config": dict(recipe)})
    return plain


@pytest.mark.parametrize("name", FORMATS)
def test_what_the_files_stand_for_is_what_is_decoded(name: str, tmp_path: Path) -> None:
    plain = write(name, tmp_path / "d")
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
    verdicts = {name: checkpoint_verdict(backend(name), checkpoint, "qwen3") for name in ("torch", "sglang", "vllm")}
    assert [one.verdict for one in verdicts.values()] == ["served", "after convert", "after convert"]
    after = open_checkpoint(tmp_path / "out")
    assert {checkpoint_verdict(backend(name), after, "qwen3").verdict for name in verdicts} == {"served"}
    told = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path / "d"), "--json"]).output)
    assert told["parameters"] == sum(one.numel() for one in plain.values())


@pytest.mark.parametrize("name", [name for name in FORMATS if "GPTQ" in name or name == "AWQ"])
def test_whole_numbers_are_repacked_for_engines_without_a_change(name: str, tmp_path: Path) -> None:
    plain = write(name, tmp_path / "d")
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "d"), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "no value changed" in done.output
    checkpoint = open_checkpoint(tmp_path / "out")
    assert problems_of(tmp_path / "out") == []
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.layout == "compressed-tensors"
    read = load_tensors(checkpoint, torch.float32)
    assert all(torch.allclose(read[key], one.float(), rtol=1e-6) for key, one in plain.items())
    if name == "GPTQ":
        assert checkpoint_verdict(backend("vllm"), checkpoint, "qwen3").verdict == "served"


@pytest.mark.parametrize("name", ["MXFP8", "a mixture"])
def test_what_no_layout_takes_is_written_in_bf16_alone(name: str, tmp_path: Path) -> None:
    write(name, tmp_path / "d")
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
    write("GPTQ", tmp_path / "d")
    edit_json(tmp_path / "d" / "config.json", {"quantization_config": {**GPTQ, **change}})
    (problem,) = open_checkpoint(tmp_path / "d").problems
    assert words in problem.what
    assert "which is not read" in problem.what
