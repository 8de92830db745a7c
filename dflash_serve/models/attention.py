"""Attention over K/V that the caller owns: a model projects q, k and v, and calls an `Attend` for each layer.

One model so serves a preallocated cache, an engine's own pages and training's masks. `RaggedAttention` takes requests
of any number of rows one after another: the fastest on a CPU. `PackedCausalAttention` takes whole sequences and keeps
no K/V. `PaddedAttention` takes the same number of rows of every sequence in one SDPA a layer: on a GPU one kernel for
each sequence would cost more than its work, and fixed shapes can be captured in a CUDA graph. `PromptAttention` does
the same for prompts of different lengths. `FlashInferAttention` runs a ragged step by FlashInfer's paged kernels
(flashinfer-python 0.7.2, extra `[cuda]`). It has not run on a GPU yet, so it is used only where it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_serve.checkpoint.config import AttentionKind
from dflash_serve.models.kv_cache import KVCache, Span, span_entries, span_positions, to_device


class Attend(Protocol):
    """Attention of a block over its context and itself; the owner of the context K/V implements it."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [rows, heads, head_dim]; k, v [rows, kv_heads, head_dim] of the block's own rows, rotated -> shape of q."""
        ...


class ProjectedAttention:
    """Attention of a layer's projected rows, before q and k are normed and rotated: it does this as it stores K/V."""

    def rotated(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, qk_norm: Sequence[nn.RMSNorm] | None
    ) -> Tensor:
        """Attention of projected rows [rows, (heads + 2 kv_heads) * head_dim] -> [rows, heads * head_dim]."""
        raise NotImplementedError


def ragged_attention(
    cache: KVCache, spans: Sequence[Span], kinds: Sequence[AttentionKind], heads: int, *, flashinfer: bool = False
) -> Attend:
    """Attention of one step over a flat batch of spans, by the fewest launches on a GPU.

    Args:
        flashinfer: use FlashInfer's kernels where they can. Their windows limit the left side only, so a bidirectional
            block must not be longer than its window.
    """
    if flashinfer and windows_fit(spans, kinds):
        return FlashInferAttention(cache, spans, kinds, heads)
    if cache.keys.device.type == "cuda" and PromptAttention.fits(spans, kinds, heads):
        return PromptAttention(cache, spans, kinds, heads)
    return RaggedAttention(cache, spans, kinds, heads)


class RaggedAttention:
    """Attention of one step over a K/V cache: writes the rows' K/V, then attends up to each span's end. An `Attend`.

    Masks are made once for each kind of layer, not for each layer.
    """

    def __init__(self, cache: KVCache, spans: Sequence[Span], kinds: Sequence[AttentionKind], heads: int) -> None:
        self.cache, self.spans, self.kinds = cache, spans, kinds
        self.groups = heads // cache.keys.shape[2]
        self.views = {kind: [self._view(span, kind) for span in spans] for kind in set(kinds)}

    def _view(self, span: Span, kind: AttentionKind) -> tuple[int, Tensor | None]:
        first = 0 if kind.window is None else max(0, span.start - kind.window + 1)
        if span.length == 1:  # everything up to the row itself
            return first, None
        keys = torch.arange(first, span.start + span.length, device=self.cache.keys.device)
        visible = block_mask(keys[span.start - first :], keys, kind)
        return first, fold_mask(visible, self.groups, self.cache.keys.dtype)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, self.spans, k, v)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        outs, row = [], 0
        for (entry, start, length), (first, mask) in zip(self.spans, self.views[self.kinds[layer]], strict=True):
            seen = slice(first, start + length)
            outs.append(attend(q[row : row + length], keys[entry, :, seen], values[entry, :, seen], mask))
            row += length
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention of one sequence.

    Args:
        q: [rows, heads, head_dim].
        k, v: [kv_heads, keys, head_dim], heads a multiple of kv_heads.
        mask: from `fold_mask`; None = every key is visible to every row.

    Returns:
        [rows, heads, head_dim].
    """
    rows, heads, head_dim = q.shape
    groups = heads // k.shape[0]
    # The query heads that share a key head become extra rows of it: K and V are read once, never repeated.
    folded = q.view(rows, -1, groups, head_dim).permute(1, 2, 0, 3).reshape(-1, groups * rows, head_dim)
    out = F.scaled_dot_product_attention(folded[None], k[None], v[None], attn_mask=mask)[0]
    return out.view(-1, groups, rows, head_dim).permute(2, 0, 1, 3).reshape(rows, heads, head_dim)


def fold_mask(visible: Tensor | None, groups: int, dtype: torch.dtype) -> Tensor | None:
    """Bool [..., rows, keys], True = visible -> the additive mask [..., groups * rows, keys] that `attend` takes.

    It is additive and folded once per step: SDPA would convert a boolean mask in every layer.
    """
    if visible is None:
        return None
    mask = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float("-inf"))
    return torch.cat([mask] * groups, dim=-2)


def block_mask(query_positions: Tensor, key_positions: Tensor, kind: AttentionKind) -> Tensor | None:
    """Bool [..., rows, keys], True = visible to a block's row in a layer of this kind; None = every key is visible.

    Positions are [..., rows] and [keys]: the context's (before the block) followed by the block's own. `causal` affects
    the block only: a context position is never after a query.
    """
    if kind.window is None and not kind.causal:
        return None
    distance = query_positions[..., None] - key_positions
    visible = torch.ones_like(distance, dtype=torch.bool)
    if kind.causal:
        visible &= distance >= 0
    if kind.window is not None:
        visible &= distance < kind.window
        visible &= distance > -kind.window
    return visible


class PackedCausalAttention:
    """Attention of whole sequences packed after one another; keeps no K/V. An `Attend`."""

    def __init__(self, lengths: Sequence[int], kinds: Sequence[AttentionKind], device: torch.device) -> None:
        self.lengths, self.kinds = list(lengths), kinds
        longest = torch.arange(max(lengths), device=device)
        windowed = {kind for kind in kinds if kind.window is not None}
        self.masks = {kind: block_mask(longest, longest, kind) for kind in windowed}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = self.masks.get(self.kinds[layer])
        packed = zip(q.split(self.lengths), k.split(self.lengths), v.split(self.lengths), strict=True)
        return torch.cat([_causal(*sequence, mask) for sequence in packed])


def _causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention of one sequence, all [rows, heads or kv_heads, head_dim]; a mask restricts it to a window."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    seen = None if mask is None else mask[: q.shape[2], : q.shape[2]]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=True)
    return out[0].transpose(0, 1)


class PaddedAttention:
    """Writes N x W rows of K/V, then attends over the first `length` positions of each entry. An `Attend`.

    Every shape follows from N, W and `length`; entries and lengths of sequences are read from tensors only, so one CUDA
    graph serves every step of this shape.

    Args:
        entries: int64 [N]; None = every entry of the cache in order, read in place without a gather.
        positions: int64 [N, W], the rows' places in their entries, consecutive.
        length: keys read of each entry; more than any position.
    """

    def __init__(
        self,
        cache: KVCache,
        entries: Tensor | None,
        positions: Tensor,
        length: int,
        kinds: Sequence[AttentionKind],
        heads: int,
    ) -> None:
        self.cache, self.length, self.kinds = cache, length, kinds
        self.shape = positions.shape
        self.entries = slice(None) if entries is None else entries
        all_entries = torch.arange(len(positions), device=positions.device) if entries is None else entries
        self.row_entries = all_entries[:, None].expand_as(positions).reshape(-1)
        self.row_positions = positions.reshape(-1)
        groups = heads // cache.keys.shape[2]
        self.masks = {kind: self._mask(positions, kind, groups) for kind in set(kinds)}

    def _mask(self, positions: Tensor, kind: AttentionKind, groups: int) -> Tensor:
        """Additive [N, 1, groups * W, length]; the query heads of a key head become its rows, as in `attend`."""
        keys = torch.arange(self.length, device=positions.device)
        # Positions behind the block hold values of earlier requests.
        visible = (keys <= positions[:, -1:, None]).expand(*positions.shape, -1)
        inside = block_mask(positions, keys, kind)
        mask = fold_mask(visible if inside is None else visible & inside, groups, self.cache.keys.dtype)
        assert mask is not None
        return mask[:, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write_rows(layer, self.row_entries, self.row_positions, k, v)
        return self.read(layer, q)

    def read(self, layer: int, q: Tensor) -> Tensor:
        """Attention of q [N * W, heads, head_dim] over K/V that are in the cache."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        count, width = self.shape
        heads, head_dim = q.shape[1:]
        kv_heads = keys.shape[1]
        folded = q.view(count, width, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        folded, seen = folded.reshape(count, kv_heads, -1, head_dim), slice(0, self.length)
        mask = self.masks[self.kinds[layer]]
        out = F.scaled_dot_product_attention(folded, keys[self.entries, :, seen], values[self.entries, :, seen], mask)
        out = out.view(count, kv_heads, -1, width, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(count * width, heads, head_dim)


class PromptAttention:
    """Attention of causal spans of different lengths, all sequences in one SDPA a layer. An `Attend`.

    Only attention is padded. `RaggedAttention` would launch some eight kernels for each span and layer.
    """

    MOST = 2**28  # masked query rows x keys of a layer: half a GiB in bfloat16

    @classmethod
    def fits(cls, spans: Sequence[Span], kinds: Sequence[AttentionKind], heads: int) -> bool:
        """There are several spans, all layers are causal, and the mask is not too large."""
        longest, end = max(span.length for span in spans), max(span.start + span.length for span in spans)
        small = len(spans) * longest * heads * end <= cls.MOST
        return small and len(spans) > 1 and all(kind.causal for kind in kinds)

    def __init__(self, cache: KVCache, spans: Sequence[Span], kinds: Sequence[AttentionKind], heads: int) -> None:
        device, longest = cache.keys.device, max(span.length for span in spans)
        self.cache, self.rows = cache, len(spans) * longest
        self.entries, self.positions = span_entries(spans, device), span_positions(spans, device)
        entries, starts = to_device([[span.entry, span.start] for span in spans], device).unbind(1)
        end = max(span.start + span.length for span in spans)
        padded = starts[:, None] + torch.arange(longest, device=device)
        self.padded = PaddedAttention(cache, entries, padded, end, kinds, heads)
        self.places = to_device([n * longest + row for n, s in enumerate(spans) for row in range(s.length)], device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write_rows(layer, self.entries, self.positions, k, v)
        return self.padded.read(layer, q.new_zeros(self.rows, *q.shape[1:]).index_copy_(0, self.places, q))[self.places]


WORKSPACE = 128 * 2**20  # bytes of workspace that FlashInfer's planner needs


def windows_fit(spans: Sequence[Span], kinds: Sequence[AttentionKind]) -> bool:
    """Every row of a bidirectional span is visible to all of its rows."""
    longest = max(span.length for span in spans)
    return all(kind.causal or kind.window is None or kind.window >= longest for kind in kinds)


class FlashInferAttention:
    """Attention of one step by FlashInfer: writes the rows' K/V, then attends by one kernel per layer. An `Attend`.

    A cache entry is one page of its whole capacity ("HND"), so a page table is the list of entries and nothing is
    gathered.
    """

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


def flashinfer_problem(device: str, dtype: torch.dtype) -> str | None:
    """The reason why FlashInfer's kernels cannot be used, if there is one."""
    if device != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return f"FlashInfer needs a GPU and half precision, and this is {device} in {dtype}"
    return None if find_spec("flashinfer") else "FlashInfer is not installed"


@cache
def _workspace(device: torch.device, kind: AttentionKind) -> Tensor:
    # One for each kind of layer: it holds a plan until the step is over.
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


class PlainOperators:
    """Operators between a layer's matrix products, by PyTorch."""

    name = "plain"
    flashinfer = False  # attention of ragged passes by FlashInfer
    kernels = "plain"  # identity of the kernels: "plain", `kernels_id` of a compiled library, or Triton's version
    padded: type[PaddedAttention] = PaddedAttention  # attention of padded passes

    def add_norm(self, h: Tensor, delta: Tensor | None, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
        """(h + delta, its norm), all [rows, H]; None adds nothing."""
        h = h if delta is None else h + delta
        return h, norm(h)

    def silu_product(self, gate_up: Tensor) -> Tensor:
        """SwiGLU of gate and up, side by side: [rows, 2 * inner] -> [rows, inner]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
