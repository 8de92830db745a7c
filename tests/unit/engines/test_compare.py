"""A quantised checkpoint that lost a tensor or got a scale wrong is not written off as quantisation error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash_engines.quantize import BOUNDS, compare, decoded
from dflash_serve.checkpoint.formats import Format, quantize
from dflash_serve.errors import UserError


def source() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    names = ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "model.norm", "lm_head")
    return {f"{name}.weight": torch.randn(32, 64, generator=generator) for name in names}


def quantised(format: Format) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, tensor in source().items():
        module = name.removesuffix(".weight")
        out |= quantize(tensor, format, torch.tensor(1.0)).state(module) if "proj" in name else {name: tensor}
    return out


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_the_error_of_every_tensor_is_told(format: Format) -> None:
    measured = compare(source(), decoded(quantised(format)), BOUNDS[format])
    errors = measured["errors"]
    assert isinstance(errors, dict)
    assert errors.keys() == source().keys()
    assert errors["model.norm.weight"] == 0
    assert 0 < measured["worst_error"] < BOUNDS[format]  # type: ignore[operator]


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_a_wrong_scale_is_found(format: Format) -> None:
    written = quantised(format)
    name = "model.layers.0.mlp.up_proj.weight_scale" + ("_2" if format == "nvfp4" else "")
    written[name] = written[name] * 2
    with pytest.raises(UserError, match=r"up_proj\.weight is .* away from its source"):
        compare(source(), decoded(written), BOUNDS[format])


def test_a_lost_tensor_is_found_and_a_tied_head_is_not() -> None:
    written = decoded(quantised("fp8"))
    del written["lm_head.weight"]
    compare(source(), written, BOUNDS["fp8"])
    del written["model.norm.weight"]
    with pytest.raises(UserError, match=r"model\.norm\.weight was lost"):
        compare(source(), written, BOUNDS["fp8"])
