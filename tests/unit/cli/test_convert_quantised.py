"""`convert` of quantised drafters: to bf16, to another quantiser's layout, and to the form that engines load."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from dflash_serve.checkpoint.formats import QuantizedTensor, quantize, stored_tensors
from dflash_serve.checkpoint.reader import load_weights, open_checkpoint
from dflash_serve.checkpoint.storage import Layout, Scheme
from dflash_serve.cli.main import app
from tests.support.tiny import edit_json, problems_of, write_in_layout, write_quantized_drafter, write_tiny_drafter

CT: Layout = "compressed-tensors"
FORMS: Mapping[str, Scheme] = {
    "fp8": Scheme("fp8", static_inputs=True),
    "fp8 of compressed-tensors": Scheme("fp8", CT),
    "fp8 by row": Scheme("fp8", CT, "channel"),
    "fp8 by block": Scheme("fp8-block", "fp8", "block"),
    "int8": Scheme("int8", CT, "channel"),
    "w8a16": Scheme("w8a16", CT, "group", group=32),
    "w4a16": Scheme("w4a16", CT, "group", group=32),
    "nvfp4": Scheme("nvfp4", static_inputs=True),
    "nvfp4 of compressed-tensors": Scheme("nvfp4", CT, static_inputs=True),
    "mxfp4": Scheme("mxfp4", CT),
}
GATE, UP = "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"


def convert(*words: object) -> dict[str, object]:
    result = CliRunner().invoke(app, ["convert", *map(str, words), "--json"])
    assert result.exit_code == 0, result.output + str(result.exception)
    found: dict[str, object] = json.loads(result.output)
    return found


def plain(folder: Path) -> dict[str, Tensor]:
    return {
        name: weight.dequantize() if isinstance(weight, QuantizedTensor) else weight.float()
        for name, weight in load_weights(folder)[1].items()
    }


@pytest.mark.parametrize("scheme", FORMS.values(), ids=FORMS)
def test_dequantised_weights_are_the_decoded_ones_in_bf16(scheme: Scheme, tmp_path: Path) -> None:
    source, before = write_in_layout(tmp_path / "d", scheme), {}
    before = plain(source)
    report = convert(source, tmp_path / "out", "--dequantise")["weights"]
    assert isinstance(report, dict)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert (checkpoint.quantization, problems_of(tmp_path / "out")) == (None, [])
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        expected = before[name].bfloat16() if name.endswith("_proj.weight") else before[name]
        assert torch.equal(tensor, expected.to(tensor.dtype))
    assert (len(report["decoded"]), report["format"]) == (14, None)
    assert 0 <= report["mean_error"] <= report["largest_error"] < 2**-8


@pytest.mark.parametrize("scheme", [FORMS[name] for name in FORMS if name != "nvfp4"])
def test_its_own_layout_is_written_without_a_rounded_value(scheme: Scheme, tmp_path: Path) -> None:
    """Where scales of the tensor are shared already, or there are none."""
    source = write_in_layout(tmp_path / "d", scheme, dense=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
    report = convert(source, tmp_path / "out")["weights"]
    assert isinstance(report, dict)
    assert (report["rounded"], report["quantised"], report["layout"]) == (0, 4, scheme.layout)
    old, new = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name].reshape(new[name].shape), new[name]) for name in old)
    assert (problems_of(tmp_path / "out"), open_checkpoint(tmp_path / "out").mislisted) == ([], [])


@pytest.mark.parametrize("layout", ["modelopt", "fp8", CT])
@pytest.mark.parametrize("name", ["fp8", "fp8 of compressed-tensors"])
def test_fp8_moves_between_layouts_with_its_bits(name: str, layout: Layout, tmp_path: Path) -> None:
    source = write_in_layout(tmp_path / "d", FORMS[name], dense=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
    report = convert(source, tmp_path / "out", "--layout", layout)["weights"]
    assert isinstance(report, dict)
    assert (report["rounded"], report["layout"]) == (0, layout)
    before, after = plain(source), plain(tmp_path / "out")
    assert all(torch.equal(before[one], after[one]) for one in before)
    found = open_checkpoint(tmp_path / "out").quantised["layers.0.mlp.down_proj"]
    assert (found.layout, found.static_inputs) == (layout, name == "fp8")


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4 of compressed-tensors"])
def test_nvfp4_moves_between_layouts_and_says_what_the_reciprocal_rounds(name: str, tmp_path: Path) -> None:
    other = CT if name == "nvfp4" else "modelopt"
    source = write_in_layout(tmp_path / "d", FORMS[name], dense=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
    report = convert(source, tmp_path / "out", "--layout", other)["weights"]
    assert isinstance(report, dict)
    assert report["largest_error"] < 1e-6
    old, new = load_weights(source)[1], load_weights(tmp_path / "out")[1]
    for module, _ in open_checkpoint(source).quantised.items():
        one, two = old[f"{module}.weight"], new[f"{module}.weight"]
        assert isinstance(one, QuantizedTensor)
        assert isinstance(two, QuantizedTensor)
        assert torch.equal(one.values, two.values)
        assert torch.equal(one.scale.float(), two.scale.float())
        assert two.input_scale is not None


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_parts_of_a_fused_product_get_one_scale(format: str, tmp_path: Path) -> None:
    scheme = FORMS[format]
    source = write_in_layout(tmp_path / "d", scheme)
    state = load_file(source / "model.safetensors")
    wide = quantize(3 * plain(source)[f"{UP}.weight"], scheme.format)
    state |= {f"{UP}.{leaf}": tensor for leaf, tensor in stored_tensors(scheme, wide).items()}
    save_file({one: tensor.contiguous() for one, tensor in state.items()}, source / "model.safetensors")
    report = convert(source, tmp_path / "out")["weights"]
    assert isinstance(report, dict)
    new = load_file(tmp_path / "out" / "model.safetensors")
    scale = "weight_scale" if format == "fp8" else "weight_scale_2"
    assert torch.equal(new[f"{GATE}.{scale}"], new[f"{UP}.{scale}"])
    assert torch.equal(new[f"{GATE}.input_scale"], new[f"{UP}.input_scale"])
    assert torch.equal(new[f"{UP}.weight"], state[f"{UP}.weight"])  # the largest keeps its bits
    error = float((plain(tmp_path / "out")[f"{GATE}.weight"] - plain(source)[f"{GATE}.weight"]).norm())
    assert 0 < error / float(plain(source)[f"{GATE}.weight"].norm()) <= report["largest_error"] < 0.1
    assert report["rounded"] >= 1
    assert open_checkpoint(tmp_path / "out").unshared == []


def test_fc_and_lonely_parts_become_bf16(tmp_path: Path) -> None:
    """No engine has a product that is quantised in part, and `fc` is bf16 in all of them."""
    source = write_in_layout(tmp_path / "d", FORMS["int8"], dense=("k_proj",))
    state, scheme = load_file(source / "model.safetensors"), FORMS["int8"]
    fc = quantize(state.pop("fc.weight"), "int8")
    state |= {f"fc.{leaf}": tensor for leaf, tensor in stored_tensors(scheme, fc).items()}
    save_file(state, source / "model.safetensors")
    edit_json(source / "config.json", {"quantization_config.ignore": ["re:.*k_proj"]})
    report = convert(source, tmp_path / "out")["weights"]
    assert isinstance(report, dict)
    assert report["decoded"] == [
        "fc",
        *(f"layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qv"),
    ]
    checkpoint = open_checkpoint(tmp_path / "out")
    assert (problems_of(tmp_path / "out"), checkpoint.mislisted, len(checkpoint.quantised)) == ([], [], 8)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored["fc.weight"], fc.dequantize(torch.bfloat16))


def test_a_fused_file_is_written_apart(tmp_path: Path) -> None:
    source = write_quantized_drafter(tmp_path / "d", "fp8")
    state, whole = load_file(source / "model.safetensors"), quantize(torch.randn(128, 32), "fp8", torch.tensor(0.01))
    for name in [name for name in state if name.startswith((GATE, UP))]:
        del state[name]
    save_file(state | whole.state("layers.0.mlp.gate_up_proj"), source / "model.safetensors")
    assert convert(source, tmp_path / "out")["weights"]["rounded"] == 0  # type: ignore[index]
    new = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(torch.cat([new[f"{GATE}.weight"], new[f"{UP}.weight"]]).float(), whole.values.float())


def test_a_dry_run_tells_the_same_and_writes_nothing(tmp_path: Path) -> None:
    source = write_in_layout(tmp_path / "d", FORMS["w4a16"])
    told = convert(source, tmp_path / "out", "--dequantise", "--dry-run")
    assert not (tmp_path / "out").exists()
    assert {**convert(source, tmp_path / "out", "--dequantise"), "written": False} == told
    text = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "other"), "--dry-run"]).output
    assert "weights: 14 weights in W4A16 (compressed-tensors); no value changed" in text
    assert text.endswith("nothing was written\n")
    assert {path.name for path in tmp_path.iterdir()} == {"d", "out"}


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_dry_run_refuses_what_cannot_be_written(tmp_path: Path, options: list[str]) -> None:
    source = write_in_layout(tmp_path / "d", FORMS["w4a16"])
    below_a_file = source / "config.json" / "out"
    done = CliRunner().invoke(app, ["convert", str(source), str(below_a_file), *options])
    assert re.fullmatch(rf"{below_a_file}: cannot be written \(.*\); give another destination", str(done.exception))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("w4a16", ["--layout", "modelopt"], "W4A16 is not written in the layout of ModelOpt; take compressed-tensors"),
        ("fp8 by row", ["--layout", "fp8"], "`quant_method: fp8` has no scales by row"),
        ("fp8", ["--layout", "fp8", "--dequantise"], "dequantised weights have no layout"),
        (None, ["--dequantise"], "the drafter is not quantised"),
        (None, ["--layout", "modelopt"], "the drafter is not quantised"),
    ],
)
def test_what_cannot_be_written_is_one_line(name: str | None, options: list[str], words: str, tmp_path: Path) -> None:
    source = write_tiny_drafter(tmp_path / "d") if name is None else write_in_layout(tmp_path / "d", FORMS[name])
    result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out"), *options])
    assert result.exit_code != 0
    assert words in str(result.exception)
    assert not (tmp_path / "out").exists()
