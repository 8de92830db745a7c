"""The drafter at work: context features in, drafted tokens out, for any number of sequences at once."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from dflash_serve.drafter.kv_store import KVStore, Span, span_positions
from dflash_serve.drafter.model import Drafter

from .passes import DrafterPass
from .sequence import Sequence
from .target.model import TargetModel


class Speculator:
    """Owns the drafter's context K/V, one slot a sequence, beside the target's."""

    def __init__(self, drafter: Drafter, target: TargetModel, *, block_size: int, slots: int, capacity: int) -> None:
        self.drafter, self.target, self.block_size = drafter, target, block_size
        config = drafter.config
        self.store = KVStore(
            layers=config.num_layers,
            slots=slots,
            kv_heads=config.num_key_value_heads,
            capacity=capacity + block_size,
            head_dim=config.head_dim,
            dtype=target.embedding.dtype,
            device=target.device,
        )
        self.fill = DrafterPass(target.embedding, self.store, block_size)

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """The target layers whose outputs it wants of every verified token."""
        return self.drafter.config.target_layer_ids

    def draft(self, sequences: Many[Sequence], widths: Many[int]) -> list[list[int]]:
        """Greedy drafts for slots 1..width-1 of each sequence's block, one drafter pass for all.

        Greedy at every temperature: a point-mass draft keeps sampling lossless (`speculation.acceptance`). A grammar
        chooses among what it allows, and may end the draft early.
        """
        self.inject(sequences)
        hidden = self._fill_blocks(sequences)
        rows = [n * self.block_size + slot for n, width in enumerate(widths) for slot in range(1, width)]
        logits = self.drafter.adjust_logits(self.target.logits(hidden[rows]))
        tokens = logits.argmax(dim=-1).tolist()
        drafts, taken = [], 0
        for sequence, width in zip(sequences, widths, strict=True):
            slots = slice(taken, taken + width - 1)
            drafts.append(sequence.grammar.fill(logits[slots]) if sequence.grammar else tokens[slots])
            taken += width - 1
        return drafts

    def inject(self, sequences: Many[Sequence]) -> None:
        """Writes the context K/V of tokens verified since the last time; nothing older is recomputed."""
        sequences = [s for s in sequences if s.features]
        if not sequences:
            return
        spans = [Span(s.slot, s.injected, s.verified - s.injected) for s in sequences]
        context = self.drafter.project_context(torch.cat([rows for s in sequences for rows in s.features]))
        positions = span_positions(spans, context.device)
        self.store.write_all(spans, *self.drafter.context_kv(context, positions))
        for sequence in sequences:
            sequence.injected = sequence.verified
            sequence.features.clear()

    def _fill_blocks(self, sequences: Many[Sequence]) -> Tensor:
        """One pass over the blocks of all sequences -> hidden [sequences * B, H]."""
        anchors, starts = [s.token_ids[-1] for s in sequences], [(s.slot, s.verified) for s in sequences]
        return self.fill(self.drafter, anchors, starts)
