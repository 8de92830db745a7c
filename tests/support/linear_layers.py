"""What our compiled linear layers are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NEAR: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2},
}


def assert_is_product(out: Tensor, plain: nn.Linear, x: Tensor) -> None:
    """`out` is what PyTorch's layer makes of x in float64, as nearly as its dtype can be."""
    exact = x.double() @ plain.weight.double().T + (0 if plain.bias is None else plain.bias.double())
    torch.testing.assert_close(out.double(), exact, **NEAR[plain.weight.dtype])
