"""FP8 and NVFP4: every representable value survives, errors are those of the formats, shards are cut soundly."""

from __future__ import annotations

import pytest
import torch

from dflash_serve.checkpoint.formats import (
    E2M1,
    Format,
    QuantizedTensor,
    pack_fp4,
    quantize,
    relative_error,
    unpack_fp4,
)

FORMATS: list[Format] = ["fp8", "nvfp4"]


def weight(rows: int = 24, columns: int = 64) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def test_every_fp4_value_survives_packing() -> None:
    values = torch.tensor([[*E2M1, *(-level for level in E2M1)]])
    assert torch.equal(unpack_fp4(pack_fp4(values)), values)


def test_fp4_rounds_to_the_nearest_and_ties_to_even() -> None:
    values = torch.tensor([[0.2, 0.25, 0.3, 0.75, 1.25, 2.5, 5.0, 100.0]])
    assert unpack_fp4(pack_fp4(values)).tolist() == [[0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 4.0, 6.0]]


@pytest.mark.parametrize(("format", "bound"), [("fp8", 0.03), ("nvfp4", 0.11)])
def test_the_error_is_the_formats_own(format: Format, bound: float) -> None:
    original = weight(128, 256)
    assert 0 < relative_error(original, quantize(original, format).dequantize()) < bound


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_already_quantised_stays_exactly(format: Format) -> None:
    once = quantize(weight(), format).dequantize()
    assert torch.equal(quantize(once, format).dequantize(), once)


@pytest.mark.parametrize("format", FORMATS)
def test_a_zero_weight_stays_zero(format: Format) -> None:
    assert torch.equal(quantize(torch.zeros(4, 32), format).dequantize(), torch.zeros(4, 32))


@pytest.mark.parametrize("format", FORMATS)
def test_shards_are_cuts_of_the_whole(format: Format) -> None:
    packed = quantize(weight(), format)
    whole = packed.dequantize()
    assert torch.equal(packed.rows(6, 12).dequantize(), whole[6:12])
    assert torch.equal(packed.columns(16, 48).dequantize(), whole[:, 16:48])


def test_an_nvfp4_block_is_never_cut() -> None:
    with pytest.raises(ValueError, match="cut an NVFP4 block"):
        quantize(weight(), "nvfp4").columns(8, 24)
    with pytest.raises(ValueError, match="multiple of 16"):
        quantize(weight(4, 24), "nvfp4")


def test_the_tensors_carry_modelopts_names() -> None:
    packed = quantize(weight(), "nvfp4", torch.tensor(0.5))
    assert isinstance(packed, QuantizedTensor)
    names = ["q.weight", "q.weight_scale", "q.weight_scale_2", "q.input_scale"]
    assert list(packed.state("q")) == names
    assert packed.shape == (24, 64)
