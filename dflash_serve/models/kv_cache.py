"""Preallocated K/V of many sequences, one entry each, for target and drafter.

An entry holds one sequence contiguously (index = position), so attention reads it as a view: nothing is gathered or
concatenated, and a request's attention does not depend on the rest of the batch. Rows behind a sequence's length are
scratch: a block writes its K/V there and attends; the next step overwrites the rejected rows. A sequence is cropped by
a smaller length alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Span(NamedTuple):
    """Consecutive rows of one sequence in a flat batch: `length` rows at positions start, start + 1, ..."""

    entry: int
    start: int
    length: int


class CacheSizes(Protocol):
    """A model's configuration."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def to_device(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device | None = None) -> Tensor:
    """An int64 tensor on a device. The host does not wait for the copy, as it would for pageable memory."""
    on_gpu = device is not None and device.type == "cuda"
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=on_gpu).to(device, non_blocking=True)


def span_positions(spans: Sequence[Span], device: torch.device | None = None) -> Tensor:
    """Positions of a flat batch's rows, int64 [rows]."""
    if len(spans) == 1:
        return torch.arange(spans[0].start, spans[0].start + spans[0].length, device=device)
    return to_device([place for s in spans for place in range(s.start, s.start + s.length)], device)


def span_entries(spans: Sequence[Span], device: torch.device | None = None) -> Tensor:
    """Cache entries of a flat batch's rows, int64 [rows]."""
    return to_device([s.entry for s in spans for _ in range(s.length)], device)


class KVCache:
    """Keys and values [layers, entries, kv_heads, capacity, head_dim].

    On a CPU they are not initialised, so that a page takes memory when it is first written; nothing there reads a row
    that was not written. On a GPU padded passes read such rows, so they are zero.
    """

    def __init__(
        self,
        *,
        layers: int,
        entries: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (layers, entries, kv_heads, capacity, head_dim)
        made = torch.empty if torch.device(device).type == "cpu" else torch.zeros
        self.keys = made(shape, dtype=dtype, device=device)
        self.values = made(shape, dtype=dtype, device=device)
        self.entries, self.capacity = entries, capacity

    @classmethod
    def of(
        cls,
        config: CacheSizes,
        entries: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> KVCache:
        """A cache for `entries` sequences of up to `capacity` tokens through a model of this configuration."""
        shape = {"layers": config.num_layers, "kv_heads": config.num_key_value_heads, "head_dim": config.head_dim}
        return cls(**shape, entries=entries, capacity=capacity, dtype=dtype, device=device)

    def write(self, layer: int, spans: Sequence[Span], k: Tensor, v: Tensor) -> None:
        """Stores k, v [rows, kv_heads, head_dim] of a flat batch at its spans."""
        row = 0
        for entry, start, length in spans:
            end = start + length
            self.keys[layer, entry, :, start:end] = k[row : row + length].transpose(0, 1)
            self.values[layer, entry, :, start:end] = v[row : row + length].transpose(0, 1)
            row += length

    def write_rows(self, layer: int, entries: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores k, v [rows, kv_heads, head_dim] at int64 entries and positions [rows]: one write."""
        self.keys[layer][entries, :, positions] = k
        self.values[layer][entries, :, positions] = v

    def write_all(self, spans: Sequence[Span], k: Tensor, v: Tensor) -> None:
        """Stores k, v [rows, layers, kv_heads, head_dim] of a flat batch in every layer at once."""
        if len(spans) == 1:
            entry, start, length = spans[0]
            self.keys[:, entry, :, start : start + length] = k.permute(1, 2, 0, 3)
            self.values[:, entry, :, start : start + length] = v.permute(1, 2, 0, 3)
            return
        self.write_all_rows(span_entries(spans, k.device), span_positions(spans, k.device), k, v)

    def write_all_rows(self, entries: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores k, v [rows, layers, kv_heads, head_dim] in every layer, at int64 entries and positions [rows]."""
        self.keys[:, entries, :, positions] = k.to(self.keys.dtype)
        self.values[:, entries, :, positions] = v.to(self.values.dtype)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of an entry into another."""
        if source != target:
            self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
            self.values[:, target, :, :length] = self.values[:, source, :, :length]

    def clear(self, entry: int) -> None:
        """Zeroes an entry. Padded passes read behind a sequence's end, where NaN would spoil a later one."""
        self.keys[:, entry].zero_()
        self.values[:, entry].zero_()
