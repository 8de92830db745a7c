"""Decoding steps that stay on the device, so that each is launched before the tokens of the step before are read.

The next step needs each request's anchor and first position. Both are on the device when a step ends, so its successor
is launched at once, and the host reads tokens, learns, decides and delivers text while the device works:

    rows [N, 8] from the host, state [entries, 2] of the step before -> table [N, 3] (entry, position, anchor)
    -> drafter -> target -> features of all rows into the drafter's cache
    -> tokens by argmax or by seeded draws -> accepted = leading drafts that equal them -> state

Two captured passes do this: one up to the target's hidden rows, and one that chooses. The choice of a sampled step is
not captured. The state is written last and lies outside the graphs' memory, so other graphs may run between two steps.

Every request has its own width: a limit on the drafts that it accepts. A step is padded to the widest of them. Requests
with short and with long contexts may run in two passes, each of which is a `BlockStep`. A request that ended in the
step before takes part in one step for nothing. Requests that need the host between steps cannot run so
(`BlockSteps.holds`); they run beside these steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from dflash_serve.models.kv_cache import Span, to_device

from .model_runner import Fetched, Shape, TargetRunner, at_least
from .request import Request
from .sampler import Sampler
from .speculator import Speculator


@dataclass
class BlockStep:
    """A launched step of N requests. `widths`: the most tokens that each may gain."""

    requests: list[Request]
    widths: list[int]
    rest: Callable[[], Tensor]  # the end of `BlockSteps._choose`, which may wait for the device
    injects: bool  # the drafter's context is complete up to the next step
    context_tokens: int
    launched: float = field(default_factory=perf_counter)
    _chosen: Fetched | None = None

    def choose(self) -> Fetched:
        """Tokens and accepted drafts [N, W + 1], W as padded, on their way to the host. The state is written."""
        if self._chosen is None:
            self._chosen = Fetched(self.rest()[: len(self.requests)])
        return self._chosen


class BlockSteps:
    """Launches block steps of one target and drafter."""

    def __init__(self, runner: TargetRunner, speculator: Speculator | None, sampler: Sampler) -> None:
        self.runner, self.speculator, self.sampler = runner, speculator, sampler
        self.possible = runner.static and (speculator is None or speculator.on_device)

    def prepare(self, layer_ids: tuple[int, ...], widths: Collection[int]) -> None:
        """Captures all passes of these padded widths; no request may run."""
        if not self.possible:
            return
        for shape, features in self.runner.passes(layer_ids, widths):
            first, end = shape.length - self.runner.widest, self.runner.cache.capacity
            rows = [[0, entry, first, 0, 0, 0, 0, end] for entry in range(shape.requests)]
            self._greedy(shape, *self._passes(to_device(rows, self.runner.cache.keys.device), shape, features))

    def holds(self, request: Request) -> bool:
        """The request needs no host between its steps: its tokens depend on logits and seeds alone."""
        return self.possible and request.unconstrained and request.params.logprobs is None

    def launch(
        self,
        requests: Sequence[Request],
        widths: Mapping[int, int],
        before: Sequence[BlockStep],
        layer_ids: tuple[int, ...],
    ) -> list[BlockStep]:
        """Launches a step of each request, in one or two passes; it does not wait for the device.

        Args:
            widths: of the requests, by id.
            before: the steps before, if their tokens are not read yet.
            layer_ids: the target's layers whose features the next draft needs.
        """
        flying = flying_in(before)
        # The drafter's pass reads a whole block at any width. No block begins behind the end of its answer.
        starts = [min(each.verified + flying.get(each.id, 0), each.limit - 1) for each in requests]
        spans = [Span(each.entry, start, self.runner.widest) for each, start in zip(requests, starts, strict=True)]
        if self.speculator is not None and layer_ids:
            self.speculator.inject(requests)
        steps = list[BlockStep]()
        for part in self.runner.shapes.parts(spans):
            for step in (*before, *steps):
                step.choose()  # before the next pass overwrites what it chooses from
            shape = self.runner.shapes.fit([spans[n] for n in part])
            assert shape is not None
            chosen = [requests[n] for n in part]
            steps.append(self._launch(chosen, [widths[each.id] for each in chosen], shape, flying, layer_ids))
        return steps

    def _launch(
        self,
        requests: list[Request],
        widths: list[int],
        shape: Shape,
        flying: Collection[int],
        layer_ids: tuple[int, ...],
    ) -> BlockStep:
        shape = shape._replace(width=at_least(max(widths), 1, self.runner.widest))
        known = [
            [r.id in flying, r.entry, r.verified, r.token_ids[-1], r.seed, r.prompt_length, width - 1, r.limit]
            for r, width in zip(requests, widths, strict=True)
        ]
        # The last row is repeated: it writes the same K/V again.
        rows = to_device(known + known[-1:] * (shape.requests - len(known)), self.runner.cache.keys.device)
        passed = self._passes(rows, shape, layer_ids)
        greedy = all(request.params.greedy for request in requests)
        rest = partial(self._greedy, shape, *passed) if greedy else partial(self._choose, *passed, requests)
        step = BlockStep(requests, widths, rest, bool(layer_ids), sum(request.verified for request in requests))
        if greedy or all(request.params.top_p == 1 for request in requests):
            step.choose()
        return step

    def _passes(self, rows: Tensor, shape: Shape, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Drafter and target -> known [N, 8 + 3 + W - 1] and the target's hidden rows [N, W, H].

        `known` is `rows` with a table of each block's entry, first position and anchor, and its drafts.

        Args:
            rows: int64 [N, 8]: 1 = the state is newer than what follows; entry, first position, anchor, seed, length of
                the prompt, most drafts to accept, most tokens of prompt and answer.
        """

        def work(rows: Tensor) -> tuple[Tensor, Tensor]:
            table = rows[:, 1:4]
            newer = torch.cat([table[:, :1], self.runner.state[table[:, 0]]], dim=1)
            table = torch.where(rows[:, :1] > 0, newer, table)
            drafts = table.new_empty(len(table), 0)
            if self.speculator is not None and shape.width > 1:
                drafts = self.speculator.draft_blocks(table, shape)
            hidden, *features = self.runner.blocks(torch.cat([table, drafts], dim=1), shape, layer_ids)
            if self.speculator is not None and features:
                self.speculator.inject_blocks(table, features[0].unflatten(0, shape[:2]))
            return torch.cat([rows, table, drafts], dim=1), hidden.unflatten(0, shape[:2])

        known, hidden = self.runner.run(shape, ("blocks", layer_ids), work, rows)
        return known, hidden

    def _greedy(self, shape: Shape, known: Tensor, hidden: Tensor) -> Tensor:
        def work(known: Tensor, hidden: Tensor) -> tuple[Tensor]:
            return (self._choose(known, hidden),)

        any_length = shape._replace(length=0)
        return self.runner.run(any_length, "choice", work, known, hidden, changes=[self.runner.state])[0]

    def _choose(self, known: Tensor, hidden: Tensor, sampled: Sequence[Request] = ()) -> Tensor:
        """The step's tokens and accepted drafts [N, W + 1]; writes the next state.

        Args:
            known, hidden: from `_passes`.
            sampled: the requests, without padding; none = all are greedy.
        """
        known, hidden = known[: len(sampled) or None], hidden[: len(sampled) or None]
        rows, table, drafts = known.split([8, 3, known.shape[1] - 11], dim=1)
        logits = self.runner.target.logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        first = table[:, 1] + 1 - rows[:, 5]  # tokens of the answer so far
        tokens = self.sampler.choose(sampled, logits, rows[:, 4], first)
        room = (rows[:, 7:] - table[:, 1:2] - 2).clamp(min=0)  # for drafts, beside the bonus token
        accepted = (drafts == tokens[:, :-1]).long().cumprod(1).sum(1, keepdim=True).minimum(rows[:, 6:7]).minimum(room)
        anchors = tokens.gather(1, accepted).clamp(min=0)  # a broken token ends its request
        following = torch.cat([table[:, 1:2] + accepted + 1, anchors], dim=1)
        found = torch.cat([tokens, accepted], dim=1)
        self.runner.state.index_put_((table[:, 0],), following)
        return found


def flying_in(steps: Sequence[BlockStep]) -> dict[int, int]:
    """The requests of these steps, by id, and the most tokens that each gains by them."""
    return {request.id: width for step in steps for request, width in zip(step.requests, step.widths, strict=True)}
