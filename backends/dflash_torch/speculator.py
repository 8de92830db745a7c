"""Runs the drafter: context features in, drafted tokens out, for any number of requests at once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

import torch

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.models.drafter import Drafter, Proposal, propose_by_walk, propose_greedily
from dflash_serve.models.hot_tokens import HotHead, takes_hot_tokens
from dflash_serve.models.kv_cache import KVCache, Span, span_positions
from dflash_serve.models.target import TargetModel

from .model_runner import DrafterRunner
from .request import Request


class Speculator:
    """A drafter with its context K/V, which has one entry for each request, as the target's cache has."""

    def __init__(
        self, drafter: Drafter, target: TargetModel, *, block_size: int, max_batch_size: int, capacity: int
    ) -> None:
        self.drafter, self.target, self.block_size = drafter, target, block_size
        config = drafter.config
        self.cache = KVCache(
            layers=config.num_layers,
            entries=max_batch_size,
            kv_heads=config.num_key_value_heads,
            capacity=capacity + block_size,
            head_dim=config.head_dim,
            dtype=target.embedding.dtype,
            device=target.device,
        )
        self.drafter_runner = DrafterRunner(target.embedding, self.cache, block_size)
        self.propose = proposal_of(config)
        self.hot_head = HotHead(target.head, drafter.hot_tokens) if drafter.hot_tokens else None

    def twin(self) -> Self:
        """A speculator of this drafter with another K/V cache, so that both can run in turns."""
        made, runner = copy.copy(self), self.drafter_runner
        made.cache = self.cache.empty_twin()
        made.drafter_runner = DrafterRunner(runner.embedding, made.cache, self.block_size, static=runner.static)
        return made

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
        first, size = self.drafter.first_row, self.drafter.rows(self.block_size)
        counts = [width - 1 for width in widths]
        if min(counts) == max(counts):  # a slice needs no index on the device
            hidden = hidden.unflatten(0, (-1, size))[:, first : first + counts[0]].flatten(0, 1)
        else:
            hidden = hidden[[n * size + first + slot for n, count in enumerate(counts) for slot in range(count)]]
        grammars = [request.grammar for request in requests]
        if self.hot_head is None or any(grammar is not None for grammar in grammars):
            return self.propose(self.drafter, self.target.draft_logits, hidden, anchors, counts, grammars)
        return self.hot_head.target_ids(self.propose(self.drafter, self.hot_head, hidden, anchors, counts, grammars))

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


def proposal_of(config: DrafterConfig) -> Proposal:
    """The function that turns hidden states into tokens; slots of a drafter with heads depend on one another."""
    return propose_greedily if takes_hot_tokens(config) else propose_by_walk
