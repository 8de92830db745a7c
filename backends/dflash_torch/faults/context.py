"""What can go wrong with the context features on their way into the drafter: disturbances of their rows.

A row that never arrives is a row of zeros: without biases its keys and values are zero, as in memory never written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..request import Request
from .fault import Disturbance


def zeroed(rows: Tensor, request: Request) -> Tensor:
    """Nothing arrives."""
    return torch.zeros_like(rows)


def without_prompt(share: float = 1.0) -> Disturbance:
    """The first `share` of the prompt never arrives."""

    def disturb(rows: Tensor, request: Request) -> Tensor:
        missing = round(share * request.prompt_length)
        return rows * (_positions(rows, request) >= missing)[:, None]

    return disturb


def without_answer(rows: Tensor, request: Request) -> Tensor:
    """Only the prompt arrives."""
    return rows * (_positions(rows, request) < request.prompt_length)[:, None]


def anchors_only(rows: Tensor, request: Request) -> Tensor:
    """Of a verified block only the anchor's row arrives, not those of the accepted slots."""
    positions = _positions(rows, request)
    return rows * ((positions < request.prompt_length) | (positions == request.injected))[:, None]


class Shuffled:
    """The right rows at the wrong positions, made anew for every draft: acceptance must collapse."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, rows: Tensor, request: Request) -> Tensor:
        before = [self.kept[request.id]] if request.id in self.kept else []
        self.kept[request.id] = whole = torch.cat([*before, rows])
        request.injected = 0
        return whole[torch.randperm(len(whole), generator=self.generator).to(whole.device)]


class Late:
    """Each row one position late, as EAGLE's drafters want them: the first is there twice, the newest missing."""

    def __init__(self) -> None:
        self.last: dict[int, Tensor] = {}

    def __call__(self, rows: Tensor, request: Request) -> Tensor:
        before = self.last.get(request.id, rows[:1])
        self.last[request.id] = rows[-1:].clone()
        return torch.cat([before, rows[:-1]])


def _positions(rows: Tensor, request: Request) -> Tensor:
    return request.injected + torch.arange(len(rows), device=rows.device)
