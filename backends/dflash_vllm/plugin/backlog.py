"""Context rows that the drafter has not read yet: while no block is drafted they wait, and go in all at once."""

from __future__ import annotations

from torch import Tensor, arange, cat, empty_like, long

MOST_ROWS = 512
"""Rows that wait at most: 6 MB for SmolLM2's five features, and one product for all of them is as quick as for few."""


class Backlog:
    """The target's hidden states of tokens in the order of their steps, with their positions and their K/V slots."""

    def __init__(self) -> None:
        self.rows = 0
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        """A step's rows: [n, F*H], [n], [n]; vLLM uses the memory of the last two again, so they are copied."""
        self._parts.append((features, positions.clone(), slots.clone()))
        self.rows += len(features)

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        """All rows; it is empty then. Of a slot written twice the last row: it was given to another request since."""
        features, positions, slots = (cat(column) for column in zip(*self._parts, strict=True))
        self._parts, self.rows = [], 0
        places, number = slots.unique(return_inverse=True)
        if len(places) == len(slots):
            return features, positions, slots
        order = arange(len(slots), device=slots.device, dtype=long)
        last = empty_like(places, dtype=long).scatter_reduce_(0, number, order, "amax", include_self=False)
        return features[last], positions[last], slots[last]
