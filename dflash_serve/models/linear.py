"""A linear layer whose weights oneDNN has re-laid, so that 8 rows cost about what one costs.

PyTorch's plain CPU path picks a poor kernel for 4-16 rows, just the widths that speculation verifies;
`benchmarks/layouts.py` measures it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS_HINT = 8
"""The row count oneDNN chooses the layout for: a block. It stays good from 1 row to a prefill."""


class PackedLinear(nn.Module):
    """x [rows, in] -> [rows, out] with weights in oneDNN's blocked layout. Inference only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS_HINT)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out


def pack_linear(linear: nn.Module) -> nn.Module:
    """Gives the packed form of a CPU nn.Linear where this build of PyTorch has oneDNN; the layer itself elsewhere."""
    if not isinstance(linear, nn.Linear) or linear.weight.device.type != "cpu" or not _has_onednn():
        return linear
    return PackedLinear(linear)


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def pack_linears(module: nn.Module) -> None:
    """Packs every nn.Linear below `module`, in place."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, pack_linear(child))
        else:
            pack_linears(child)


def stack_linears(linears: list[nn.Linear]) -> nn.Linear:
    """Joins linears of one input into one whose outputs lie side by side."""
    joined = nn.Linear(
        linears[0].in_features, sum(linear.out_features for linear in linears), bias=False, device="meta"
    )
    joined.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if linears[0].bias is not None:
        joined.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    return joined
