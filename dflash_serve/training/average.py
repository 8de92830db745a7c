"""An exponential average of the drafter's weights, which smooths the last steps' noise away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dflash_serve.models.drafter import Drafter


class Average:
    """average = decay * average + (1 - decay) * weights after every step; without a decay there is none."""

    def __init__(self, drafter: Drafter, decay: float | None) -> None:
        self.drafter, self.decay = drafter, decay
        self.tensors: dict[str, Tensor] = {}
        if decay is not None:
            self.tensors = {name: weight.detach().clone() for name, weight in drafter.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        """Takes in the weights of this step."""
        if self.decay is not None:
            for name, weight in self.drafter.named_parameters():
                self.tensors[name].lerp_(weight, 1 - self.decay)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Goes back to a saved average."""
        for name in self.tensors:
            self.tensors[name].copy_(tensors[name])

    def published(self) -> dict[str, Tensor]:
        """The weights to validate and to save as the drafter."""
        return dict(self.tensors or self.drafter.state_dict())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the drafter has the average's weights."""
        if not self.tensors:
            yield
            return
        own = {name: weight.detach().clone() for name, weight in self.drafter.named_parameters()}
        self.drafter.load_state_dict(self.tensors)
        try:
            yield
        finally:
            self.drafter.load_state_dict(own)
