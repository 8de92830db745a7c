"""A ragged step's attention by FlashInfer's paged kernels, where the extra `[cuda]` is installed. Not run on a GPU yet.

An entry of the K/V cache is one page of its whole capacity, so the cache is FlashInfer's paged cache as it is ("HND"),
a page table is the list of entries, and nothing is gathered. Written against flashinfer-python 0.7.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from dflash_serve.checkpoint.config import AttentionKind
from dflash_serve.models.kv_cache import KVCache, Span, span_entries, span_positions

WORKSPACE = 128 * 2**20
"""Bytes that its planner asks for."""


def usable(cache: KVCache, spans: Sequence[Span], kinds: Sequence[AttentionKind]) -> bool:
    """Whether its kernels serve this step: on a GPU, in half precision (they have none for fp32).

    Its windows end on the left only; a bidirectional block must not be longer than its window, and none is.
    """
    on_gpu = cache.keys.device.type == "cuda" and cache.keys.dtype in (torch.bfloat16, torch.float16)
    return on_gpu and _installed() and windows_fit(spans, kinds)


def windows_fit(spans: Sequence[Span], kinds: Sequence[AttentionKind]) -> bool:
    """Whether no row of a bidirectional span is hidden from an earlier one."""
    longest = max(span.length for span in spans)
    return all(kind.causal or kind.window is None or kind.window >= longest for kind in kinds)


class FlashInferAttention:
    """Writes the rows' K/V, then attends up to each span's end; one kernel a layer. An `Attend`."""

    def __init__(self, cache: KVCache, spans: Sequence[Span], kinds: Sequence[AttentionKind], heads: int) -> None:
        device = cache.keys.device
        self.cache, self.kinds = cache, kinds
        self.row_entries, self.row_positions = span_entries(spans, device), span_positions(spans, device)
        self.wrappers = {kind: self._plan(spans, kind, heads) for kind in set(kinds)}

    def _plan(self, spans: Sequence[Span], kind: AttentionKind, heads: int) -> Any:
        _, _, kv_heads, capacity, head_dim = self.cache.keys.shape
        entries, starts, lengths = torch.tensor(spans, dtype=torch.int32).unbind(dim=1)
        rows = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
        wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(
            _workspace(self.cache.keys.device, kind), "HND", backend="fa2"
        )
        wrapper.plan(
            qo_indptr=rows,
            paged_kv_indptr=torch.arange(len(spans) + 1, dtype=torch.int32),
            paged_kv_indices=entries.to(self.cache.keys.device),
            paged_kv_last_page_len=starts + lengths,
            num_qo_heads=heads,
            num_kv_heads=kv_heads,
            head_dim_qk=head_dim,
            page_size=capacity,
            causal=kind.causal,  # a span's rows are the last ones of its keys, as its kernels assume
            window_left=-1 if kind.window is None else kind.window - 1,
            q_data_type=self.cache.keys.dtype,
        )
        return wrapper

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write_rows(layer, self.row_entries, self.row_positions, k, v)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        out: Tensor = self.wrappers[self.kinds[layer]].run(q.contiguous(), (keys, values))
        return out


@cache
def _installed() -> bool:
    """Looked up once: every step of a GPU asks."""
    return find_spec("flashinfer") is not None


@cache
def _workspace(device: torch.device, kind: AttentionKind) -> Tensor:
    """One for each kind of layer: a plan lives in it until the step is over."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
