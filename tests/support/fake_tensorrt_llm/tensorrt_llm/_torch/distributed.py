"""AllReduce over torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn


class AllReduce(nn.Module):
    def __init__(self, *, mapping: Any) -> None:
        super().__init__()
        self.mapping = mapping

    def forward(self, x: Tensor) -> Tensor:
        total = x.clone()
        torch.distributed.all_reduce(total)
        return total
