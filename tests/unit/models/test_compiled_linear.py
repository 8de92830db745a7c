"""Compiled linear layers: PyTorch's results, with each row independent of the others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from dflash_serve.models import layers
from dflash_serve.models.compiled.build import find_compiler
from dflash_serve.models.layers import CompiledLinear, PackedLinear, compiled_linear, pack_linear
from tests.support.linear_layers import assert_is_product

DTYPES = (torch.float32, torch.bfloat16)
pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def no_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


def layer(inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool = True) -> tuple[nn.Linear, CompiledLinear]:
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)
    ours = compiled_linear(plain)
    assert ours is not None
    return plain, ours


@pytest.mark.parametrize(
    ("inputs", "outputs", "bias", "dtype"),  # whole tiles, and incomplete ones
    [
        *((*sizes, dtype) for sizes in [(576, 960, True), (50, 49, False)] for dtype in DTYPES),
        *((2, 1, False, torch.bfloat16), (1536, 47, True, torch.float32), (8192, 100, False, torch.bfloat16)),
    ],
)
@torch.inference_mode()
def test_it_is_pytorchs_product(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
    plain, ours = layer(inputs, outputs, dtype, bias=bias)
    assert torch.equal(ours.weight, plain.weight)
    for rows in (1, 3, 8, 21):
        x = torch.randn(rows, inputs).to(dtype)
        assert_is_product(ours(x), plain, x)


@pytest.mark.parametrize(("inputs", "narrow"), [(576, True), (577, False)])
@torch.inference_mode()
def test_float32_weights_that_are_bfloat16s_numbers_take_half_the_bytes(inputs: int, narrow: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(inputs, 100).requires_grad_(False)
    plain.weight.copy_(plain.weight.bfloat16())
    ours, x = compiled_linear(plain), torch.randn(9, inputs)
    assert ours is not None
    assert ours.packed.dtype == (torch.bfloat16 if narrow else torch.float32)
    assert ours.weight.dtype == torch.float32
    assert torch.equal(ours.weight, plain.weight)
    assert_is_product(ours(x), plain, x)
    plain.weight[3, 5] += 2**-14  # one number that bfloat16 has not
    again = compiled_linear(plain)
    assert again is not None
    assert again.packed.dtype == torch.float32


@torch.inference_mode()
def test_rounded_it_takes_half_the_bytes_and_is_nearly_the_same() -> None:
    plain, ours = layer(64, 40, torch.float32)
    rounded, x = ours.rounded(), torch.randn(5, 64)
    assert rounded.packed.nbytes * 2 == pytest.approx(ours.packed.nbytes)
    assert torch.equal(rounded.weight, plain.weight.bfloat16().float())
    torch.testing.assert_close(rounded(x), plain(x), rtol=0.02, atol=0.02)
    assert rounded.rounded() is rounded
    odd = layer(63, 40, torch.float32)[1]
    assert odd.rounded() is odd


@pytest.mark.parametrize(
    ("dtype", "narrow"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)], ids=str
)
@pytest.mark.parametrize("threads", [1, 2])
@torch.inference_mode()
def test_a_row_comes_out_bit_for_bit_as_alone(dtype: torch.dtype, narrow: bool, threads: int) -> None:
    plain = nn.Linear(1536, 250, dtype=dtype).requires_grad_(False)
    ours = compiled_linear(plain.bfloat16().to(dtype) if narrow else plain)
    assert ours is not None
    assert ours.packed.dtype == (torch.bfloat16 if narrow else dtype)
    before = torch.get_num_threads()
    x = torch.randn(40, 1536).to(dtype)
    alone = torch.cat([ours(row[None]) for row in x])
    torch.set_num_threads(threads)
    try:
        for rows in (*range(1, 10), 40):
            assert torch.equal(ours(x[:rows]), alone[:rows])
            assert torch.equal(ours(x[-rows:]), alone[-rows:])
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def test_rows_may_come_in_any_shape_and_order() -> None:
    _, ours = layer(64, 40, torch.float32)
    x = torch.randn(64, 6).T
    expected: Tensor = ours(x.contiguous())
    assert torch.equal(ours(x), expected)
    assert torch.equal(ours(x.reshape(2, 3, 64)), expected.view(2, 3, 40))
    assert ours(x[:0]).shape == (0, 40)


@pytest.mark.parametrize("x", [torch.zeros(1, 63), torch.zeros(1, 64, dtype=torch.bfloat16)], ids=["size", "dtype"])
def test_rows_of_another_layer_are_refused(x: Tensor) -> None:
    with pytest.raises(ValueError, match="for a layer of 64"):
        layer(64, 40, torch.float32)[1](x)


@pytest.mark.parametrize(
    ("inputs", "dtype", "amx", "packs", "ours"),
    [
        (64, torch.float32, False, True, True),
        (63, torch.float32, False, True, True),
        (64, torch.bfloat16, False, True, True),
        (63, torch.bfloat16, False, True, False),
        (64, torch.float64, False, True, False),
        (64, torch.float32, True, True, True),
        (64, torch.bfloat16, True, True, False),
        (64, torch.bfloat16, True, False, True),
    ],
)
def test_what_is_not_ours_is_left_to_onednn(
    monkeypatch: pytest.MonkeyPatch, inputs: int, dtype: torch.dtype, amx: bool, packs: bool, ours: bool
) -> None:
    """Also where the CPU has matrix units and oneDNN was told not to use them."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(layers, "_onednn_packs", lambda dtype: packs)
    linear = nn.Linear(inputs, 8, dtype=dtype)
    assert (compiled_linear(linear) is not None) == ours


def test_layers_are_packed_by_us_unless_told_not_to() -> None:
    linear = nn.Linear(64, 8)
    assert isinstance(pack_linear(linear), CompiledLinear)
    assert isinstance(pack_linear(linear, compiled=False), PackedLinear)
    ours = pack_linear(linear)
    assert copy.deepcopy(ours) is ours
