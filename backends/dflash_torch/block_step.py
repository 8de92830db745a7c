"""Decoding steps that stay on the device, so that each is launched before the tokens of the step before are read.

The next step needs each request's anchor, first position and new features. All three are on the device when a step
ends, so its successor is launched at once, and the host reads tokens, learns, decides and delivers text while the
device works:

    table [N, 3] (entry, position, anchor) -> features of the step before into the drafter's cache -> drafter -> target
    -> tokens by argmax or by seeded draws -> accepted = leading drafts that equal them -> the next table

A request that ended in the step before takes part in one step for nothing. Only requests whose tokens depend on logits
and seeds alone can run so, in one width and in a padded shape: see `BlockSteps.launch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from dflash_serve.models.kv_cache import Span, to_device

from .model_runner import Fetched, Shape, TargetRunner
from .request import Request
from .sampler import Sampler
from .speculator import Speculator


@dataclass
class BlockStep:
    """A launched step of N requests with `width` rows each."""

    requests: list[Request]
    width: int
    table: Tensor  # int64 [N, 3]: entry, first position, anchor
    following: Tensor  # int64 [N, 2]: first position and anchor of the next step
    features: Tensor | None  # [N, width, F*H]
    fetched: Fetched  # [N, width + 1]: the target's tokens, and the number of accepted drafts
    context_tokens: int
    launched: float = field(default_factory=perf_counter)
    injected: set[int] = field(default_factory=set)  # requests whose features the next step took

    def place(self, request: Request) -> int | None:
        """Row of a request in this step."""
        return next((row for row, each in enumerate(self.requests) if each.id == request.id), None)


@dataclass(frozen=True)
class Plan:
    """Requests of a step: rows in the step before (None = not in it), upper bounds of positions, and shapes."""

    requests: list[Request]
    sources: list[int | None]
    starts: list[int]
    width: int
    shape: Shape
    draft_shape: Shape | None


class BlockSteps:
    """Launches block steps of one target and drafter."""

    def __init__(self, runner: TargetRunner, speculator: Speculator | None, sampler: Sampler) -> None:
        self.runner, self.speculator, self.sampler = runner, speculator, sampler

    def candidates(self, decoding: Sequence[Request], before: BlockStep | None) -> list[Request] | None:
        """The requests of the next step; None = they need the host between steps."""
        if self.speculator is not None and not self.speculator.on_device:
            return None
        if not all(request.needs_no_host for request in decoding):
            return None
        flying = {request.id for request in before.requests} if before else set()
        # Every step brings a token: a request that lacks one ends in the step before.
        return [request for request in decoding if request.remaining > (request.id in flying)] or None

    def plan(self, requests: list[Request], before: BlockStep | None, widths: Sequence[int]) -> Plan | None:
        """The step of these requests; None where widths differ, or no shape holds them."""
        width, speculator = widths[0], self.speculator
        drafts = width > 1 and speculator is not None
        if any(each != width for each in widths) or (drafts and not all(each.draftable for each in requests)):
            return None
        rows = {request.id: row for row, request in enumerate(before.requests)} if before else {}
        sources = [rows.get(request.id) for request in requests]
        ahead = before.width if before else 0
        starts = [each.verified + ahead * (row is not None) for each, row in zip(requests, sources, strict=True)]
        spans = [Span(each.entry, start, width) for each, start in zip(requests, starts, strict=True)]
        shape, draft_shape = self.runner.shapes.fit(spans), None
        if drafts and speculator is not None:
            places = [(span.entry, span.start) for span in spans]
            draft_shape = speculator.drafter_runner.fit(speculator.drafter, places)
        if shape is None or (drafts and draft_shape is None):
            return None
        return Plan(requests, sources, starts, width, shape, draft_shape)

    def launch(self, plan: Plan, before: BlockStep | None, layer_ids: tuple[int, ...]) -> BlockStep:
        """Launches a step; it does not wait for the device.

        Args:
            before: the step before, if its tokens are not read yet.
            layer_ids: the target's layers whose features the next draft needs.
        """
        requests, width, device = plan.requests, plan.width, self.runner.cache.keys.device
        known = [
            [-1 if row is None else row, each.entry, each.verified, each.token_ids[-1], each.seed, each.prompt_length]
            for row, each in zip(plan.sources, requests, strict=True)
        ]
        rows = to_device(known, device)
        table = rows[:, 1:4]
        if before is not None:
            moved = before.following[rows[:, 0].clamp(min=0)]
            table = torch.cat([table[:, :1], torch.where(rows[:, :1] >= 0, moved, table[:, 1:])], dim=1)
        drafts = table.new_empty(len(requests), 0)
        if plan.draft_shape is not None and self.speculator is not None:
            self._inject(plan, before)
            drafts = self.speculator.draft_blocks(requests, table, plan.draft_shape, width - 1)
        hidden, features = self.runner.blocks(torch.cat([table, drafts], dim=1), plan.shape, layer_ids)
        logits = self.runner.target.logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        first = table[:, 1] + 1 - rows[:, 5]  # tokens of the answer so far
        tokens = self.sampler.choose(requests, logits, rows[:, 4], first)
        accepted = (drafts == tokens[:, :-1]).long().cumprod(1).sum(1, keepdim=True)
        anchors = tokens.gather(1, accepted).clamp(min=0)  # a broken token ends its request
        return BlockStep(
            requests=requests,
            width=width,
            table=table,
            following=torch.cat([table[:, 1:2] + accepted + 1, anchors], dim=1),
            features=None if features is None else features.clone(),
            fetched=Fetched(torch.cat([tokens, accepted], dim=1)),
            context_tokens=sum(request.verified for request in requests),
        )

    def _inject(self, plan: Plan, before: BlockStep | None) -> None:
        """The drafter's context of everything verified: what the host knows, then the step before."""
        assert self.speculator is not None
        self.speculator.inject(plan.requests)
        rows = [row for row in plan.sources if row is not None]
        if before is None or before.features is None or not rows:
            return
        table, features = before.table, before.features
        if rows != list(range(len(before.requests))):
            chosen = to_device(rows, table.device)
            table, features = table[chosen], features[chosen]
        self.speculator.inject_blocks(table, features)
        before.injected = {before.requests[row].id for row in rows}
