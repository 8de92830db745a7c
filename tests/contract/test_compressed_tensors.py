"""Drafters that compressed-tensors stores: its own compressors write the weights, and its configuration reads ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_serve.checkpoint.formats import QuantizedTensor
from dflash_serve.checkpoint.reader import load_weights, open_checkpoint
from dflash_serve.checkpoint.storage import Layout, Scheme
from tests.support.tiny import even_config, random_tensors, write_in_layout

quantization = pytest.importorskip("compressed_tensors.quantization")
compressors = pytest.importorskip("compressed_tensors.compressors")
parameters = pytest.importorskip("compressed_tensors.quantization.utils")

CT: Layout = "compressed-tensors"
SCHEMES: Mapping[str, Scheme] = {
    "FP8": Scheme("fp8", CT),
    "FP8 by channel": Scheme("fp8", CT, "channel"),
    "FP8 by block": Scheme("fp8-block", CT, "block", block=(32, 32)),
    "W8A8": Scheme("int8", CT, "channel"),
    "W8A16": Scheme("w8a16", CT, "channel"),
    "W4A16": Scheme("w4a16", CT, "group", group=32),
    "W4A16 with zero points": Scheme("w4a16", CT, "group", group=32, symmetric=False),
    "W8A16 with zero points": Scheme("w8a16", CT, "channel", symmetric=False),
    "NVFP4": Scheme("nvfp4", CT),
    "MXFP4": Scheme("mxfp4", CT),
}


def compressed(weight: Tensor, scheme: Any, format: str) -> tuple[dict[str, Tensor], Tensor]:
    """A weight as compressed-tensors stores it, by scales of its own, and as it decompresses that."""
    arguments = scheme.weights
    state: dict[str, Tensor] = {"weight": weight}
    if arguments.group_size is not None:
        grouped = weight.view(len(weight), -1, arguments.group_size)
    elif str(arguments.strategy) == "block":
        high, wide = arguments.block_structure
        grouped = weight.view(len(weight) // high, high, -1, wide).transpose(1, 2).flatten(2)
    else:
        grouped = weight[:, None] if str(arguments.strategy) == "channel" else weight.reshape(1, 1, -1)
    given = {}
    if format == "nvfp4-pack-quantized":
        given["global_scale"] = parameters.generate_gparam(weight.amin(), weight.amax())
        state["weight_global_scale"] = given["global_scale"]
    scale, point = parameters.calculate_qparams(grouped.amin(-1), grouped.amax(-1), arguments, **given)
    state["weight_scale"] = scale.reshape(1) if scale.numel() == 1 else scale
    if not arguments.symmetric:
        state["weight_zero_point"] = point.to(torch.int8)
    compressor = compressors.BaseCompressor.get_value_from_registry(format)
    stored = compressor.compress(state, scheme)
    return stored, compressor.decompress(dict(stored), scheme)["weight"]


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_what_their_compressor_stores_is_read_as_it_decompresses_it(scheme: Scheme, tmp_path: Path) -> None:
    config = even_config()
    folder = write_in_layout(tmp_path / "d", Scheme("fp8", CT), config)
    state, expected = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    fields = json.loads((folder / "config.json").read_text())
    other = json.loads((write_in_layout(tmp_path / "e", scheme, config) / "config.json").read_text())
    fields["quantization_config"] = other["quantization_config"]
    read = quantization.QuantizationConfig.model_validate(fields["quantization_config"])
    group = read.config_groups["group_0"]
    for name, tensor in random_tensors(config).items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            state.pop(f"{module}.weight_scale"), state.pop(f"{module}.weight")
            stored, expected[name] = compressed(tensor.bfloat16(), group, read.format)
            state |= {f"{module}.{leaf}": part.contiguous() for leaf, part in stored.items()}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.problems, set(checkpoint.quantised.values())) == ([], {scheme})
    weights = load_weights(folder)[1]
    for name, tensor in expected.items():
        weight = weights[name]
        assert isinstance(weight, QuantizedTensor)
        if scheme.format == "nvfp4":  # they decode to bfloat16 in several steps, we in float32
            torch.testing.assert_close(weight.dequantize(), tensor.float(), rtol=2**-7, atol=0)
        else:
            assert torch.equal(weight.dequantize(tensor.dtype), tensor), name
