"""The blocks of one step: many anchors of several sequences, laid out as flat rows for one pass of the drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_serve.checkpoint.config import AttentionKind

CONTEXT_STEP = 32


@dataclass(frozen=True)
class Blocks:
    """Flat rows are [all blocks of sequence 0, of sequence 1, ...], B rows a block.

    Attributes:
        anchors: positions int64 [blocks]; anchor_ids: their tokens int64 [blocks].
        positions: int64 [blocks * B], anchor .. anchor + B - 1.
        targets: token ids int64 [blocks, B-1] of slots 1..B-1; valid: bool, False behind the sequence's end.
        counts: blocks of each sequence.
        contexts: context rows of each, positions 0 .. contexts - 1; up to a multiple of 32, so that shapes recur.
    """

    block_size: int
    anchors: Tensor
    anchor_ids: Tensor
    positions: Tensor
    targets: Tensor
    valid: Tensor
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


def lay_out(sequences: Sequence[Tensor], anchors: Sequence[Tensor], block_size: int) -> Blocks:
    """Blocks of sequences' token ids (int64 [length] each) at the given anchors (int64 [count] each)."""
    ids, targets, valid = [], [], []
    ahead = torch.arange(1, block_size, device=sequences[0].device)
    for tokens, starts in zip(sequences, anchors, strict=True):
        places = starts[:, None] + ahead
        valid.append(places < len(tokens))
        targets.append(tokens[places.clamp(max=len(tokens) - 1)])
        ids.append(tokens[starts])
    starts = torch.cat(list(anchors))
    slots = torch.arange(block_size, device=starts.device)
    return Blocks(
        block_size=block_size,
        anchors=starts,
        anchor_ids=torch.cat(ids),
        positions=(starts[:, None] + slots).flatten(),
        targets=torch.cat(targets),
        valid=torch.cat(valid),
        counts=tuple(len(a) for a in anchors),
        contexts=tuple(-(-int(a.max()) // CONTEXT_STEP) * CONTEXT_STEP for a in anchors),
    )
