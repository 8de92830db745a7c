"""The blocks of one step: which sequences and anchors, their layout as flat rows, and the drafter's pass over them.

Sequences and anchors are functions of seed and step alone, so that a resumed run is the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from dflash_serve.models.attention import Attend
from dflash_serve.models.attention.blocks import BlockAttention, BlockLayout, ContextKV, FlexBlockAttention
from dflash_serve.models.drafter import Drafter

CONTEXT_STEP = 32
"""Context rows come in multiples of it, so that shapes recur."""


@dataclass(frozen=True)
class Blocks(BlockLayout):
    """The blocks of a step, what their anchors are and what their slots must predict.

    Attributes:
        anchor_ids: the anchors' tokens int64 [blocks].
        targets: token ids int64 [blocks, B-1] of slots 1..B-1; valid: bool, False behind the sequence's end, and behind
            the first token of a text that the target would not have said.
    """

    anchor_ids: Tensor
    targets: Tensor
    valid: Tensor


def epoch_order(seed: int, epoch: int, count: int) -> Tensor:
    """A permutation of `count` sequences, int64 [count]."""
    return torch.randperm(count, generator=_generator(seed, epoch, 0))


def step_sequences(seed: int, step: int, count: int, per_step: int) -> list[tuple[int, int]]:
    """(epoch, index) of the sequences of a step; epochs follow one another without a gap."""
    epochs: dict[int, Sequence[int]] = {}
    chosen = []
    for place in range(step * per_step, (step + 1) * per_step):
        epoch, offset = divmod(place, count)
        if epoch not in epochs:
            epochs[epoch] = epoch_order(seed, epoch, count).tolist()
        chosen.append((epoch, epochs[epoch][offset]))
    return chosen


def draw_anchors(seed: int, epoch: int, index: int, *, first: int, length: int, count: int) -> Tensor:
    """Sorted anchors int64 [<= count] among the answer's positions first .. length-2, without repetition.

    The last position is none: nothing follows it. `first` is the answer's first token, which prefill has sampled but
    the target has not read: the same state as after every verification.
    """
    candidates = torch.arange(first, length - 1)
    chosen = torch.randperm(len(candidates), generator=_generator(seed, epoch, index + 1))[:count]
    return candidates[chosen].sort().values


def _generator(seed: int, epoch: int, index: int) -> torch.Generator:
    """A generator of its own for every (seed, epoch, index): the order of the calls does not matter."""
    mixed = ((seed * 1_000_003 + epoch) * 1_000_003 + index) & 0x7FFF_FFFF_FFFF_FFFF
    return torch.Generator().manual_seed(mixed)


def lay_out(
    sequences: Sequence[Tensor],
    anchors: Sequence[Tensor],
    block_size: int,
    rows: int | None = None,
    *,
    says: Sequence[Tensor | None] | None = None,
) -> Blocks:
    """Blocks of sequences' token ids (int64 [length] each) at the given anchors (int64 [count] each).

    Args:
        rows: of a block, the drafter's input: B, and B - 1 where slots are anchor-first; None = B.
        says: as in `Example`; None = all sequences are the target's own answers.
    """
    ids, targets, valid = [], [], []
    ahead = torch.arange(1, block_size, device=sequences[0].device)
    for tokens, starts, said in zip(sequences, anchors, says or [None] * len(sequences), strict=True):
        places = starts[:, None] + ahead
        inside = places < len(tokens)
        there = tokens[places.clamp(max=len(tokens) - 1)]
        if said is not None:
            wanted = said.to(tokens.device)[places.clamp(max=len(tokens) - 1) - 1].to(there)
            inside[:, 1:] &= (there == wanted)[:, :-1].cumprod(1).bool()
            there = wanted
        valid.append(inside)
        targets.append(there)
        ids.append(tokens[starts])
    starts = torch.cat(list(anchors))
    own = torch.arange(rows or block_size, device=starts.device)
    return Blocks(
        block_size=len(own),
        anchors=starts,
        anchor_ids=torch.cat(ids),
        positions=(starts[:, None] + own).flatten(),
        targets=torch.cat(targets),
        valid=torch.cat(valid),
        counts=tuple(len(a) for a in anchors),
        contexts=tuple(-(-int(a.max()) // CONTEXT_STEP) * CONTEXT_STEP for a in anchors),
    )


class BlockForward:
    """Runs a drafter over `Blocks`: on CPU with plain products, on CUDA with compiled FlexAttention.

    Args:
        embedding: the target's table [vocabulary, H].
        dtype: what it computes in; the drafter's own weights stay fp32, and are rounded once a step.
    """

    def __init__(self, drafter: Drafter, embedding: Tensor, *, dtype: torch.dtype) -> None:
        self.dtype, self.whole = dtype, _Pass(drafter, embedding.to(dtype), _flex(embedding.device))

    def __call__(self, blocks: Blocks, features: Sequence[Tensor]) -> Tensor:
        """Hidden states [blocks, B-1, H] of slots 1..B-1, after the final norm.

        Args:
            features: [length, F*H] of each sequence; no row from its last anchor on is seen.
        """
        # Rounded weights rather than autocast: that keeps the norms in fp32 and casts at every border between the two,
        # which on a CPU costs as much as the products.
        rounded = {name: weight.to(self.dtype) for name, weight in self.whole.named_parameters()}
        rows = context_rows(features, blocks.contexts)
        hidden: Tensor = functional_call(self.whole, rounded, (blocks, rows.to(self.dtype)))
        first = self.whole.drafter.first_row
        return hidden.view(len(blocks.anchors), blocks.block_size, -1)[:, first:]


class _Pass(nn.Module):
    """Everything from features to hidden states, as one module whose weights can be replaced."""

    def __init__(self, drafter: Drafter, embedding: Tensor, flex: Callable[..., Any] | None) -> None:
        super().__init__()
        self.drafter, self.flex = drafter, flex
        self.embedding = (embedding,)  # in a tuple: it is not ours to train or to move

    def forward(self, blocks: Blocks, features: Tensor) -> Tensor:
        """features [sum of contexts, F*H] -> [blocks * B, H]."""
        context = self.drafter.context_kv(self.drafter.project_context(features), blocks.context_positions())
        size = blocks.targets.shape[1] + 1
        noise = self.drafter.noise(blocks.anchor_ids, self.embedding[0], size)
        hidden: Tensor = self.drafter(noise, blocks.positions, self._attention(blocks, context), size)
        return hidden

    def _attention(self, blocks: Blocks, context: ContextKV) -> Attend:
        kinds = self.drafter.config.layers
        if self.flex is not None:
            return FlexBlockAttention(blocks, context, kinds, self.flex)
        return BlockAttention(blocks, context, kinds, context[0].dtype)


def context_rows(features: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """The first `count` rows of each sequence, zeros behind its end (which no block sees): [sum of counts, F*H]."""
    pieces = [F.pad(f[:count], (0, 0, 0, max(0, count - len(f)))) for f, count in zip(features, counts, strict=True)]
    return torch.cat(pieces)


def _flex(device: torch.device) -> Callable[..., Any] | None:
    if device.type != "cuda":
        return None
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled
