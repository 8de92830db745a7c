"""Runs the drafter: context features in, drafted tokens out, for any number of requests at once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from dflash_serve.models.drafter import Drafter, HotHead, propose, propose_blocks
from dflash_serve.models.kv_cache import KVCache, Span, span_positions, to_device
from dflash_serve.models.target import TargetModel

from .model_runner import DrafterRunner, Shape
from .request import Request


class Speculator:
    """A drafter with its context K/V, which has one entry for each request, as the target's cache has.

    Args:
        cache: K/V cache of a drafter with the same sizes that drafts no more; None = a new one.
    """

    on_device = True  # False = its drafts, or the features that it gets, are changed on the host

    def __init__(
        self,
        drafter: Drafter,
        target: TargetModel,
        *,
        block_size: int,
        max_batch_size: int,
        capacity: int,
        cache: KVCache | None = None,
    ) -> None:
        self.drafter, self.target, self.block_size = drafter, target, block_size
        hot = drafter.hot_tokens
        self.hot_head = HotHead(target.head, hot, drafter.markov_head) if hot else None
        self.cache = cache or KVCache.of(
            drafter.config, max_batch_size, capacity + block_size, target.embedding.dtype, target.device
        )
        self.drafter_runner = DrafterRunner(target.embedding, self.cache, block_size)

    def twin(self) -> Self:
        """A speculator of this drafter and its K/V cache, with passes of its own; both can run in turns."""
        made, runner = copy.copy(self), self.drafter_runner
        made.drafter_runner = DrafterRunner(runner.embedding, self.cache, self.block_size, static=runner.static)
        return made

    def clear_context(self) -> None:
        """Zeroes the context that another speculator left, where passes read beyond a sequence's end.

        A drafter with a fault may have left NaN there.
        """
        if self.drafter_runner.static:
            self.cache.keys.zero_()
            self.cache.values.zero_()

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """The target layers whose outputs the drafter takes for every verified token."""
        return self.drafter.config.target_layer_ids

    def draft(self, requests: Sequence[Request], widths: Sequence[int]) -> list[list[int]]:
        """Greedy drafts for slots 1..width-1 of each request's block, one drafter pass for all.

        Drafts are greedy at every temperature: a point-mass draft keeps sampling lossless (`speculation.acceptance`).
        A grammar restricts the choice, and may end the draft early.
        """
        self.inject(requests)
        anchors = [request.token_ids[-1] for request in requests]
        hidden = self.drafter_runner(self.drafter, anchors, [(request.entry, request.verified) for request in requests])
        first, size = self.drafter.config.first_row, self.drafter.config.rows(self.block_size)
        counts = [width - 1 for width in widths]
        if min(counts) == max(counts):  # a slice needs no index on the device
            hidden = hidden.unflatten(0, (-1, size))[:, first : first + counts[0]].flatten(0, 1)
        else:
            rows = [n * size + first + slot for n, count in enumerate(counts) for slot in range(count)]
            hidden = hidden[to_device(rows, hidden.device)]
        grammars = [request.grammar for request in requests]
        hot = None if any(grammar is not None for grammar in grammars) else self.hot_head
        return propose(self.drafter, hot or self.target.draft_logits, hidden, anchors, counts, grammars)

    def draft_blocks(self, table: Tensor, shape: Shape) -> Tensor:
        """Greedy drafts [N, W - 1] without grammars, for a graph.

        Args:
            table: int64 [N, 3]: the entry, the first position and the anchor of each block.
            shape: of the target's pass over the blocks.
        """
        (hidden,) = self.drafter_runner.blocks(self.drafter, table, shape)
        head, first = self.hot_head or self.target.draft_logits, self.drafter.config.first_row
        rows = hidden.unflatten(0, (len(table), -1))[:, first : first + shape.width - 1]
        return propose_blocks(self.drafter, head, rows, table[:, 2])

    def inject_blocks(self, table: Tensor, features: Tensor) -> None:
        """Writes the context K/V of whole blocks' features [N, W, F*H], by a table as of `draft_blocks`.

        Rows of rejected slots are written, too. The next block of the request begins before them and overwrites them.
        """
        positions = table[:, 1:2] + torch.arange(features.shape[1], device=table.device)
        entries, flat = table[:, :1].expand_as(positions).reshape(-1), positions.reshape(-1)
        context = self.drafter.project_context(features.flatten(0, 1))
        self.cache.write_all_rows(entries, flat, *self.drafter.context_kv(context, flat))

    def inject(self, requests: Sequence[Request]) -> None:
        """Writes the context K/V of tokens verified since the last call; nothing older is recomputed."""
        requests = [request for request in requests if request.features]
        if not requests:
            return
        spans = [Span(request.entry, request.injected, request.verified - request.injected) for request in requests]
        context = self.drafter.project_context(torch.cat([rows for request in requests for rows in request.features]))
        positions = span_positions(spans, context.device)
        self.cache.write_all(spans, *self.drafter.context_kv(context, positions))
        for request in requests:
            request.injected = request.verified
            request.features.clear()
