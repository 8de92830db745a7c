"""Preallocated K/V for many sequences, one slot each, for target and drafter alike.

A slot holds one sequence contiguously (index = position), so attention reads it as a view: nothing is gathered or
concatenated, and a request's attention cannot depend on who shares the batch. Rows behind a sequence's length are
scratch: a block writes its K/V there, attends, and the next step overwrites what was not accepted. Cropping is
forgetting a length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_serve.drafter.attention import attend, block_mask, fold_mask
from dflash_serve.drafter.config import AttentionKind


class Span(NamedTuple):
    """Consecutive rows of one sequence in a flat batch: `length` rows at positions start, start + 1, ..."""

    slot: int
    start: int
    length: int


def span_positions(spans: Sequence[Span], device: torch.device | None = None) -> Tensor:
    """Positions of a flat batch's rows, int64 [rows]."""
    return torch.cat([torch.arange(s.start, s.start + s.length, device=device) for s in spans])


class KVStore:
    """Keys and values [layers, slots, kv_heads, capacity, head_dim]; memory is taken only as it is touched (on CPU)."""

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (layers, slots, kv_heads, capacity, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.slots, self.capacity = slots, capacity

    def write(self, layer: int, spans: Sequence[Span], k: Tensor, v: Tensor) -> None:
        """Stores k, v [rows, kv_heads, head_dim] of a flat batch at their spans."""
        row = 0
        for slot, start, length in spans:
            end = start + length
            self.keys[layer, slot, :, start:end] = k[row : row + length].transpose(0, 1)
            self.values[layer, slot, :, start:end] = v[row : row + length].transpose(0, 1)
            row += length

    def write_rows(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores k, v [rows, kv_heads, head_dim] at int64 slots and positions [rows]: one write, wherever they lie."""
        self.keys[layer][slots, :, positions] = k
        self.values[layer][slots, :, positions] = v

    def write_all(self, spans: Sequence[Span], k: Tensor, v: Tensor) -> None:
        """Stores k, v [rows, layers, kv_heads, head_dim] of a flat batch in every layer at once."""
        row = 0
        for slot, start, length in spans:
            end = start + length
            self.keys[:, slot, :, start:end] = k[row : row + length].permute(1, 2, 0, 3)
            self.values[:, slot, :, start:end] = v[row : row + length].permute(1, 2, 0, 3)
            row += length

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of a slot into another; the same slot is left as it is."""
        if source != target:
            self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
            self.values[:, target, :, :length] = self.values[:, source, :, :length]


class StoreAttention:
    """One step's attention of a flat batch over a store: writes the rows' K/V, then attends up to each span's end.

    Masks are made once here, for each kind of layer, not once a layer. Satisfies `drafter.model.Attend`.
    """

    def __init__(self, store: KVStore, spans: Sequence[Span], kinds: Sequence[AttentionKind], heads: int) -> None:
        self.store, self.spans, self.kinds = store, spans, kinds
        self.groups = heads // store.keys.shape[2]
        self.views = {kind: [self._view(span, kind) for span in spans] for kind in set(kinds)}

    def _view(self, span: Span, kind: AttentionKind) -> tuple[int, Tensor | None]:
        """The first key position that matters to the span, and the mask from there on."""
        first = 0 if kind.window is None else max(0, span.start - kind.window + 1)
        if span.length == 1:  # everything up to the row itself
            return first, None
        keys = torch.arange(first, span.start + span.length, device=self.store.keys.device)
        visible = block_mask(keys[span.start - first :], keys, kind)
        return first, fold_mask(visible, self.groups, self.store.keys.dtype)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.store.write(layer, self.spans, k, v)
        keys, values = self.store.keys[layer], self.store.values[layer]
        outs, row = [], 0
        for (slot, start, length), (first, mask) in zip(self.spans, self.views[self.kinds[layer]], strict=True):
            seen = slice(first, start + length)
            outs.append(attend(q[row : row + length], keys[slot, :, seen], values[slot, :, seen], mask))
            row += length
        return outs[0] if len(outs) == 1 else torch.cat(outs)
