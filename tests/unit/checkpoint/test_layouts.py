"""Quantised drafters as ModelOpt, compressed-tensors and `quant_method: fp8` store them are read, or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from dflash_serve.checkpoint.config import expected_tensors
from dflash_serve.checkpoint.formats import QuantizedTensor, pack_words, quantize, relative_error, unpack_words
from dflash_serve.checkpoint.reader import load_tensors, load_weights, open_checkpoint
from dflash_serve.checkpoint.storage import Layout, Scheme
from dflash_serve.cli.main import app
from dflash_serve.errors import UserError
from tests.support.tiny import edit_json, even_config, problems_of, random_tensors, write_in_layout

CT: Layout = "compressed-tensors"
SCHEMES: Mapping[str, tuple[Scheme, float]] = {
    "ModelOpt FP8": (Scheme("fp8", static_inputs=True), 0.03),
    "ModelOpt FP8 by channel": (Scheme("fp8", "modelopt", "channel"), 0.03),
    "ModelOpt FP8 by block": (Scheme("fp8-block", "modelopt", "block"), 0.03),
    "ModelOpt NVFP4": (Scheme("nvfp4", static_inputs=True), 0.12),
    "ModelOpt NVFP4, weights alone": (Scheme("nvfp4"), 0.12),
    "FP8": (Scheme("fp8", "fp8"), 0.03),
    "FP8 by block": (Scheme("fp8-block", "fp8", "block"), 0.03),
    "compressed FP8": (Scheme("fp8", CT), 0.03),
    "compressed FP8 by channel": (Scheme("fp8", CT, "channel"), 0.03),
    "compressed FP8, static": (Scheme("fp8", CT, static_inputs=True), 0.03),
    "compressed FP8 by block": (Scheme("fp8-block", CT, "block"), 0.03),
    "W8A8": (Scheme("int8", CT, "channel"), 0.01),
    "W8A16": (Scheme("w8a16", CT, "channel"), 0.01),
    "W8A16 by group": (Scheme("w8a16", CT, "group", group=32), 0.01),
    "W4A16": (Scheme("w4a16", CT, "group", group=32), 0.13),
    "W4A16 by channel": (Scheme("w4a16", CT, "channel"), 0.2),
    "compressed NVFP4": (Scheme("nvfp4", CT, static_inputs=True), 0.12),
    "compressed NVFP4, weights alone": (Scheme("nvfp4", CT), 0.12),
    "compressed MXFP4": (Scheme("mxfp4", CT), 0.14),
}
PRODUCT = "layers.1.mlp.down_proj"


@pytest.mark.parametrize(("scheme", "bound"), SCHEMES.values(), ids=SCHEMES)
def test_every_layout_is_read(scheme: Scheme, bound: float, tmp_path: Path) -> None:
    folder = write_in_layout(tmp_path / "d", scheme)
    assert problems_of(folder) == []
    checkpoint = open_checkpoint(folder)
    assert checkpoint.quantization is not None
    assert (checkpoint.quantization.format, checkpoint.quantization.layout) == (scheme.format, scheme.layout)
    assert (len(checkpoint.quantised), checkpoint.mislisted) == (14, [])
    original, read = random_tensors(even_config()), load_tensors(checkpoint, torch.float32)
    assert read.keys() == original.keys()
    assert torch.equal(read["fc.weight"], original["fc.weight"])
    for name, tensor in original.items():
        assert relative_error(tensor, read[name]) < (bound if name.endswith("_proj.weight") else 1e-9)
    weight = load_weights(folder)[1][f"{PRODUCT}.weight"]
    assert isinstance(weight, QuantizedTensor)
    assert (weight.input_scale is not None) == scheme.static_inputs


@pytest.mark.parametrize("scheme", [Scheme("nvfp4", static_inputs=True), Scheme("w4a16", CT, "group", group=32)])
def test_modules_in_bf16_are_by_their_tensors(scheme: Scheme, tmp_path: Path) -> None:
    """As one publisher quantises for SGLang: o_proj and the MLP alone."""
    folder = write_in_layout(tmp_path / "d", scheme, dense=("q_proj", "k_proj", "v_proj"))
    checkpoint = open_checkpoint(folder)
    assert (problems_of(folder), len(checkpoint.quantised), checkpoint.mislisted) == ([], 8, [])
    original, read = random_tensors(even_config()), load_tensors(checkpoint, torch.float32)
    assert torch.equal(read["layers.0.self_attn.k_proj.weight"], original["layers.0.self_attn.k_proj.weight"])


@pytest.mark.parametrize("name", ["W4A16", "W8A16 by group", "compressed NVFP4", "compressed MXFP4", "W8A8"])
def test_packed_parameters_are_counted_one_by_one(name: str, tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["inspect", str(write_in_layout(tmp_path / "d", SCHEMES[name][0])), "--json"])
    assert json.loads(told.output)["parameters"] == sum(map(prod, expected_tensors(even_config()).values()))


@pytest.mark.parametrize("scheme", [Scheme("fp8", CT, "channel"), Scheme("fp8-block", CT, "block")])
def test_fp8_of_weights_alone_stays_so(scheme: Scheme, tmp_path: Path) -> None:
    folder, group = write_in_layout(tmp_path / "d", scheme), "quantization_config.config_groups.group_0"
    edit_json(folder / "config.json", {f"{group}.input_activations": None})
    result = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert written["config_groups"]["group_0"]["input_activations"] is None
    refused = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "other"), "--layout", "modelopt"])
    assert "rounds activations beside FP8 weights" in str(refused.exception)
    assert not (tmp_path / "other").exists()


def test_a_list_that_contradicts_the_tensors_is_known(tmp_path: Path) -> None:
    folder = write_in_layout(tmp_path / "d", Scheme("int8", CT, "channel"))
    edit_json(folder / "config.json", {"quantization_config.ignore": ["re:.*down_proj"]})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.mislisted == ["fc", "layers.0.mlp.down_proj", PRODUCT]
    assert checkpoint.problems == []
    (note,) = json.loads(CliRunner().invoke(app, ["inspect", str(folder), "--json"]).output)["notes"]
    assert note.startswith("the files say otherwise than the tensors whether fc and 2 more is quantised")
    CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "out")])
    assert json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path / "out"), "--json"]).output)["notes"] == []


def test_a_fused_product_is_cut_with_its_words_scales_and_zero_points(tmp_path: Path) -> None:
    scheme = Scheme("w4a16", CT, "group", group=32, symmetric=False)
    folder = write_in_layout(tmp_path / "d", Scheme("w4a16", CT, "group", group=32), dense=("mlp.down_proj",))
    edit_json(folder / "config.json", {"quantization_config.config_groups.group_0.weights.symmetric": False})
    state = load_file(folder / "model.safetensors")
    whole = quantize(torch.randn(320, 64), "w4a16", group=32)
    points = torch.randint(-8, 8, whole.scale.shape, dtype=torch.int8)
    for layer in (0, 1):
        for module in [name.removesuffix(".weight_packed") for name in state if name.endswith(".weight_packed")]:
            rows = state[f"{module}.weight_scale"].shape
            state[f"{module}.weight_zero_point"] = pack_words(torch.zeros(rows, dtype=torch.int8), 4, dim=0)
        for part in ("gate_proj", "up_proj"):
            for leaf in ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point"):
                state.pop(f"layers.{layer}.mlp.{part}.{leaf}")
        fused = f"layers.{layer}.mlp.gate_up_proj"
        state |= {f"{fused}.weight_packed": pack_words(whole.values, 4), f"{fused}.weight_scale": whole.scale}
        state |= {f"{fused}.weight_shape": torch.tensor([320, 64])}
        state |= {f"{fused}.weight_zero_point": pack_words(points, 4, dim=0)}
        save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert problems_of(folder) == []
    assert checkpoint.quantised["layers.0.mlp.up_proj"] == scheme
    expected = (whole.values.view(320, 2, 32) - points[..., None].float()) * whole.scale[..., None]
    read = load_weights(folder)[1]["layers.1.mlp.up_proj.weight"]
    assert isinstance(read, QuantizedTensor)
    assert torch.equal(read.dequantize(), expected.view(320, 64)[160:])


@pytest.mark.parametrize(("bits", "count"), [(4, 24), (8, 24), (4, 29), (8, 29)])
def test_words_are_unpacked_as_they_were_packed(bits: int, count: int) -> None:
    values = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (6, count)).to(torch.int8)
    assert torch.equal(unpack_words(pack_words(values, bits), bits, count), values)
    turned = unpack_words(pack_words(values, bits, dim=0), bits, 6, dim=0)
    assert torch.equal(turned, values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quantised with 'bitsandbytes' (config.json's quantization_config), which is not read",
        ),
        ({"config_groups.group_0.weights.num_bits": 3}, "config_groups.group_0: int3 weights by channel"),
        ({"config_groups.group_0.weights.strategy": "tensor_group"}, "int8 weights by tensor_group"),
        ({"config_groups.group_0.format": "marlin-24"}, "in 'marlin-24'"),
        ({"config_groups.group_0": None}, "config_groups.group_0: no arguments"),
        ({"config_groups": {}}, "without config_groups"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "transforms, which rotate weights"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "'fp8' with weight_block_size [128]"),
    ],
)
def test_a_configuration_that_is_not_read_is_one_line(change: Mapping[str, object], words: str, tmp_path: Path) -> None:
    folder = write_in_layout(tmp_path / "d", Scheme("int8", CT, "channel"))
    edit_json(folder / "config.json", {f"quantization_config.{key}": value for key, value in change.items()})
    with pytest.raises(UserError) as caught:
        load_weights(folder)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_formats_that_differ_by_group_are_refused(tmp_path: Path) -> None:
    folder = write_in_layout(tmp_path / "d", Scheme("int8", CT, "channel"))
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
    floats = {**groups["group_0"], "format": "float-quantized"}
    floats["weights"] = {**floats["weights"], "type": "float"}
    edit_json(folder / "config.json", {"quantization_config.config_groups.group_1": floats})
    with pytest.raises(UserError, match=r"in several formats \(int8, fp8\)"):
        load_weights(folder)


BAD: list[tuple[dict[str, Tensor | None], str]] = [
    ({f"{PRODUCT}.weight_scale": None}, "down_proj.weight_scale [64, 5] is missing"),
    ({f"{PRODUCT}.weight_shape": None}, "down_proj.weight_shape [2] is missing"),
    ({f"{PRODUCT}.weight_scale": torch.ones(64, 4)}, "down_proj.weight_scale has shape [64, 4]"),
    ({f"{PRODUCT}.weight_packed": torch.zeros(64, 19, dtype=torch.int32)}, "[64, 19], config.json asks for [64, 20]"),
    ({f"{PRODUCT}.weight_zero_point": torch.zeros(8, 5, dtype=torch.int32)}, "weight_zero_point [8, 5] is not part"),
    ({f"{PRODUCT}.weight_scale": torch.full((64, 5), float("nan"))}, "320 values that are NaN"),
]


@pytest.mark.parametrize(("change", "words"), BAD, ids=[words for _, words in BAD])
def test_a_tensor_that_does_not_fit_is_named(change: Mapping[str, Tensor | None], words: str, tmp_path: Path) -> None:
    folder = write_in_layout(tmp_path / "d", Scheme("w4a16", CT, "group", group=32))
    state = {**load_file(folder / "model.safetensors"), **change}
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, folder / "model.safetensors")
    assert any(words in str(problem) for problem in problems_of(folder)), problems_of(folder)
    with pytest.raises(UserError):
        load_weights(folder)


def test_a_declared_format_in_which_nothing_is_stored_is_told(tmp_path: Path) -> None:
    folder = write_in_layout(tmp_path / "d", Scheme("fp8", "fp8"), dense=("_proj",))
    edit_json(folder / "config.json", {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}})
    with pytest.raises(
        UserError, match=r"says? that the drafter is quantised to FP8 \(quant_method fp8\), but no tens"
    ):
        load_weights(folder)


def test_scales_of_a_quantised_cache_belong_to_no_weight(tmp_path: Path) -> None:
    folder = write_in_layout(tmp_path / "d", Scheme("fp8", static_inputs=True))
    state = load_file(folder / "model.safetensors")
    state |= {f"layers.{i}.self_attn.{one}_proj.{one}_scale": torch.tensor(1.0) for i in (0, 1) for one in "kv"}
    save_file(state, folder / "model.safetensors")
    edit_json(folder / "hf_quant_config.json", {"quantization.kv_cache_quant_algo": "FP8"})
    assert problems_of(folder) == []
