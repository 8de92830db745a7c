"""The optimiser of a recipe (AdamW, or Muon for the backbone's matrices and AdamW for the rest), its rate, and the
weights' average.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dflash_serve.models.drafter import Drafter
from dflash_serve.training.recipe import TrainingSection

HEADS = ("markov_head.", "confidence_head.")
"""Beginnings of names: tables and single rows, to which Muon's equal steps in all directions do not fit."""


class Optimizer:
    """One or two PyTorch optimisers stepped together; weight decay on matrices only."""

    def __init__(self, module: nn.Module, settings: TrainingSection) -> None:
        matrices = {name: p for name, p in module.named_parameters() if p.dim() == 2}
        vectors = [p for p in module.parameters() if p.dim() != 2]
        self.parts: list[torch.optim.Optimizer]
        if settings.optimizer == "muon":
            heads = [matrices.pop(name) for name in list(matrices) if name.startswith(HEADS)]
            muon = torch.optim.Muon(
                list(matrices.values()), lr=settings.lr, weight_decay=settings.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )  # fmt: skip
            self.parts = [muon, self._adamw([{"params": vectors, "weight_decay": 0.0}, {"params": heads}], settings)]
        else:
            own = list(matrices.values())
            groups: list[dict[str, Any]] = [{"params": own}, {"params": vectors, "weight_decay": 0.0}]
            self.parts = [self._adamw(groups, settings)]

    @staticmethod
    def _adamw(groups: Iterable[dict[str, Any]], settings: TrainingSection) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            groups, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )

    def step(self, lr: float) -> None:
        """Updates the weights and forgets the gradients."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()
            part.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """All state as named tensors: part.parameter.name."""
        return {
            f"{number}.{parameter}.{name}": value if isinstance(value, Tensor) else torch.tensor(float(value))
            for number, part in enumerate(self.parts)
            for parameter, state in part.state_dict()["state"].items()
            for name, value in state.items()
        }

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        for number, part in enumerate(self.parts):
            whole = part.state_dict()
            whole["state"] = {}
            for key, value in tensors.items():
                owner, parameter, name = key.split(".", 2)
                if int(owner) == number:
                    whole["state"].setdefault(int(parameter), {})[name] = value
            part.load_state_dict(whole)


def learning_rate(progress: float, settings: TrainingSection) -> float:
    """Linear warm-up over the first `warmup` share of the budget, then a cosine down to `final_lr` x `lr`."""
    peak, warmup, final = settings.lr, settings.warmup, settings.final_lr
    if progress < warmup:
        return peak * max(progress, 1e-3) / warmup  # never 0: the first step is part of the warm-up
    along = min(1.0, (progress - warmup) / max(1e-9, 1.0 - warmup))
    return peak * (final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * along)))


class Average:
    """An exponential average of the drafter's weights, which smooths the last steps' noise away.

    average = decay * average + (1 - decay) * weights after every step; without a decay there is none.
    """

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
