"""Attention of many blocks at once, each seeing its own context and itself, nothing of other blocks: in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_serve.checkpoint.config import AttentionKind

ContextKV = tuple[Tensor, Tensor]
"""Keys and values of the flat context rows, each [rows, layers, kv_heads, head_dim] (`Drafter.context_kv`)."""


@dataclass(frozen=True)
class BlockLayout:
    """Where the blocks of one pass are. Flat rows are [all blocks of sequence 0, of sequence 1, ...], B rows a block.

    Attributes:
        block_size: rows of a block, here B; an anchor-first drafter has one less.
        anchors: positions int64 [blocks]; positions: int64 [blocks * B], anchor .. anchor + B - 1.
        counts: blocks of each sequence.
        contexts: context rows of each, at positions 0 .. contexts - 1.
    """

    block_size: int
    anchors: Tensor
    positions: Tensor
    counts: tuple[int, ...]
    contexts: tuple[int, ...]

    def context_positions(self) -> Tensor:
        """Positions int64 [sum of contexts] of the flat context rows."""
        return torch.cat([torch.arange(rows, device=self.anchors.device) for rows in self.contexts])

    def context_visible(self, kind: AttentionKind) -> list[Tensor]:
        """A sequence's bool [blocks, B or 1, context rows]: features strictly before the anchor, within the window."""
        out = []
        for anchors, rows in zip(self.anchors.split(self.counts), self.contexts, strict=True):
            keys = torch.arange(rows, device=anchors.device)
            visible = (keys < anchors[:, None])[:, None]
            if kind.window is not None:
                queries = anchors[:, None] + torch.arange(self.block_size, device=anchors.device)
                visible = visible & (queries[:, :, None] - keys < kind.window)
            out.append(visible)
        return out

    def block_visible(self, kind: AttentionKind) -> Tensor:
        """Bool [B, B] of what the slots of one block see of each other."""
        slots = torch.arange(self.block_size, device=self.anchors.device)
        distance = slots[:, None] - slots
        visible = distance >= 0 if kind.causal else torch.ones_like(distance, dtype=torch.bool)
        return visible if kind.window is None else visible & (distance.abs() < kind.window)


class BlockAttention:
    """Softmax over two parts, context and own block, in plain products. An `Attend`.

    A dense mask over all blocks would spend most of its keys on other blocks: on 2 cores with AMX (64 blocks of 8, 300
    context rows, 9/3 heads x 64, bf16) SDPA with that mask took 4.2 + 17.3 ms forward + backward, this 3.9 + 6.3.
    """

    def __init__(
        self, blocks: BlockLayout, context: ContextKV, kinds: Sequence[AttentionKind], dtype: torch.dtype
    ) -> None:
        self.blocks, self.kinds = blocks, kinds
        # Unbound once: a slice a layer would cost a gradient of the whole tensor a layer.
        self.context = [[per_layer.split(blocks.contexts) for per_layer in part.unbind(1)] for part in context]
        self.masks = {kind: self._masks(kind, dtype) for kind in set(kinds)}

    def _masks(self, kind: AttentionKind, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
        seen = self.blocks.context_visible(kind)
        return [_additive(visible, dtype) for visible in seen], _additive(self.blocks.block_visible(kind), dtype)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [count * self.blocks.block_size for count in self.blocks.counts]
        context_k, context_v = (part[layer] for part in self.context)
        context_masks, block_mask = self.masks[self.kinds[layer]]
        size = self.blocks.block_size
        parts = zip(q.split(rows), k.split(rows), v.split(rows), context_k, context_v, context_masks, strict=True)
        return torch.cat([_attend(a, b, c, (ck, cv), seen, block_mask, size) for a, b, c, ck, cv, seen in parts])


def _attend(
    q: Tensor, k: Tensor, v: Tensor, context: tuple[Tensor, Tensor], context_mask: Tensor, block_mask: Tensor, size: int
) -> Tensor:
    """One sequence: q [A*B, heads, D]; k, v [A*B, kv_heads, D]; context k, v [C, kv_heads, D] -> like q."""
    context_k, context_v = context
    heads, dim = q.shape[1:]
    kv_heads, rows = k.shape[1], len(context_k)
    groups, blocks = heads // kv_heads, len(q) // size
    # [kv_heads, A, groups * B, D]: the query heads that share a key head are more rows of it.
    queries = q.view(blocks, size, kv_heads, groups, dim).permute(2, 0, 3, 1, 4).reshape(kv_heads, blocks, -1, dim)
    queries = queries * dim**-0.5
    keys, values = (x.view(blocks, size, kv_heads, dim).permute(2, 0, 1, 3) for x in (k, v))
    to_context = (queries.reshape(kv_heads, -1, dim) @ context_k.permute(1, 2, 0)).view(
        kv_heads, blocks, groups, -1, rows
    )
    to_block = (queries @ keys.transpose(-1, -2)).view(kv_heads, blocks, groups, size, size)
    scores = torch.cat([to_context + context_mask[:, None], to_block + block_mask], dim=-1)
    weights = scores.softmax(-1).to(values.dtype).view(kv_heads, blocks, -1, rows + size)
    out = (weights[..., :rows].reshape(kv_heads, -1, rows) @ context_v.transpose(0, 1)).view_as(queries)
    out = out + weights[..., rows:] @ values
    return out.view(kv_heads, blocks, groups, size, dim).permute(1, 3, 0, 2, 4).reshape(-1, heads, dim)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float("-inf"))


class FlexBlockAttention:
    """`BlockAttention` through FlexAttention, which skips the hidden tiles: for CUDA, compiled once.

    Its values are tested against `BlockAttention` on CPU (forward only); it has not been run on a GPU yet.
    """

    def __init__(
        self, blocks: BlockLayout, context: ContextKV, kinds: Sequence[AttentionKind], flex: Callable[..., Any]
    ) -> None:
        self.context, self.kinds, self.flex = context, kinds, flex
        self.masks = {kind: _flex_mask(blocks, kind) for kind in set(kinds)}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context_k, context_v = (part[:, layer] for part in self.context)
        keys, values = (torch.cat(pair).transpose(0, 1)[None] for pair in ((context_k, k), (context_v, v)))
        mask = self.masks[self.kinds[layer]]
        out: Tensor = self.flex(q.transpose(0, 1)[None], keys, values, block_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)


def _flex_mask(blocks: BlockLayout, kind: AttentionKind) -> Any:
    """FlexAttention's mask; keys are [all context rows, all block rows], queries all block rows."""
    from torch.nn.attention.flex_attention import create_block_mask

    device, size = blocks.anchors.device, blocks.block_size
    owner = torch.arange(len(blocks.counts), device=device)
    query_sequence = owner.repeat_interleave(torch.tensor(blocks.counts, device=device)).repeat_interleave(size)
    context_sequence = owner.repeat_interleave(torch.tensor(blocks.contexts, device=device))
    context_position = blocks.context_positions()
    query_position, anchor = blocks.positions, blocks.anchors.repeat_interleave(size)
    within, last = blocks.block_visible(kind), len(context_position) - 1

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = key.clamp(max=last)
        in_context = (context_sequence[place] == query_sequence[query]) & (context_position[place] < anchor[query])
        if kind.window is not None:
            in_context = in_context & (query_position[query] - context_position[place] < kind.window)
        row = (key - last - 1).clamp(min=0)
        in_block = (row // size == query // size) & within[query % size, row % size]
        return torch.where(key <= last, in_context, in_block)

    queries, keys = len(query_position), last + 1 + len(query_position)
    return create_block_mask(visible, None, None, queries, keys, device=str(device))
