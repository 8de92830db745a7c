"""Decoding steps that stay on the device, so that each is launched before the tokens of the step before are read.

The next step needs each request's anchor and first position. Both are on the device when a step ends, so its successor
is launched at once, and the host reads tokens, learns, decides and delivers text while the device works:

    rows [N, 7] from the host, state [entries, 2] of the step before -> table [N, 3] (entry, position, anchor)
    -> drafter -> target -> tokens by argmax or by seeded draws -> accepted = leading drafts that equal them
    -> features of all rows into the drafter's cache -> the next state

A greedy step is one captured pass. Of a sampled one, target and drafter are captured, each by itself. A request that
ended in the step before takes part in one step for nothing. Only requests whose tokens depend on logits and seeds alone
can run so, in one width and in a padded shape: see `BlockSteps.shape`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """A launched step of N requests with `width` rows each."""

    requests: list[Request]
    width: int
    rest: Callable[[], tuple[Tensor, Tensor]]  # the end of `BlockSteps._choose`, which may wait for the device
    injects: bool  # the drafter's context is complete up to the next step
    context_tokens: int
    launched: float = field(default_factory=perf_counter)
    _chosen: tuple[Fetched, Tensor] | None = None

    @property
    def ids(self) -> set[int]:
        return {request.id for request in self.requests}

    def choose(self) -> tuple[Fetched, Tensor]:
        """Tokens and accepted drafts [N, W + 1], W as padded, on their way to the host; and the next step's state.

        The state is int64 [entries, 2]: first position and anchor of the next step, by cache entry.
        """
        if self._chosen is None:
            found, state = self.rest()
            self._chosen = Fetched(found[: len(self.requests)]), state
        return self._chosen


class BlockSteps:
    """Launches block steps of one target and drafter."""

    def __init__(self, runner: TargetRunner, speculator: Speculator | None, sampler: Sampler) -> None:
        self.runner, self.speculator, self.sampler = runner, speculator, sampler

    def prepare(self, layer_ids: tuple[int, ...]) -> None:
        """Captures all greedy steps; no request may run."""
        for shape, features in self.runner.passes(layer_ids):
            first, device = shape.length - self.runner.widest, self.runner.cache.keys.device
            rows = to_device([[0, entry, first, 0, 0, 0, shape.width - 1] for entry in range(shape.requests)], device)
            self._greedy(rows, self._no_state(rows), shape, features)

    def candidates(self, decoding: Sequence[Request], before: BlockStep | None) -> list[Request] | None:
        """The requests of the next step; None = they need the host between steps."""
        if self.speculator is not None and not self.speculator.on_device:
            return None
        if not all(request.unconstrained and request.params.logprobs is None for request in decoding):
            return None
        flying = before.ids if before else set()
        # Every step brings a token: a request that lacks one ends in the step before.
        return [request for request in decoding if request.remaining > (request.id in flying)] or None

    def shape(self, requests: Sequence[Request], before: BlockStep | None, widths: Sequence[int]) -> Shape | None:
        """The padded shape of a step of these requests; None where widths differ, or no shape holds them."""
        width, flying, ahead = widths[0], before.ids if before else set(), before.width if before else 0
        if any(each != width for each in widths) or (width > 1 and not all(each.draftable for each in requests)):
            return None
        # The drafter's pass reads a whole block at any width.
        starts = [(each.entry, each.verified + ahead * (each.id in flying)) for each in requests]
        shape = self.runner.shapes.fit([Span(entry, start, self.runner.widest) for entry, start in starts])
        return shape and shape._replace(width=at_least(width, 1, self.runner.widest))

    def launch(
        self, requests: list[Request], width: int, shape: Shape, before: BlockStep | None, layer_ids: tuple[int, ...]
    ) -> BlockStep:
        """Launches a step; it does not wait for the device.

        Args:
            before: the step before, if its tokens are not read yet.
            layer_ids: the target's layers whose features the next draft needs.
        """
        flying = before.ids if before else set()
        known = [
            [each.id in flying, each.entry, each.verified, each.token_ids[-1], each.seed, each.prompt_length, width - 1]
            for each in requests
        ]
        # The last row is repeated: it writes the same K/V again.
        rows = to_device(known + known[-1:] * (shape.requests - len(known)), self.runner.cache.keys.device)
        state = before.choose()[1] if before else self._no_state(rows)
        if self.speculator is not None and layer_ids:
            self.speculator.inject(requests)
        greedy = all(request.params.greedy for request in requests)
        if greedy:
            rest = partial(self._greedy, rows, state, shape, layer_ids)
        else:
            rest = partial(
                self._choose, state, *self._passes(rows, state, shape, layer_ids, joined=False), sampled=requests
            )
        step = BlockStep(requests, width, rest, bool(layer_ids), sum(request.verified for request in requests))
        if greedy or all(request.params.top_p == 1 for request in requests):
            step.choose()
        return step

    def _no_state(self, rows: Tensor) -> Tensor:
        return rows.new_zeros(self.runner.cache.entries, 2)

    def _greedy(self, rows: Tensor, state: Tensor, shape: Shape, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        def work(rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            return self._choose(state, *self._passes(rows, state, shape, layer_ids, joined=True))

        found, following = self.runner.run(shape, ("step", layer_ids), work, rows, state)
        return found, following

    def _passes(
        self, rows: Tensor, state: Tensor, shape: Shape, layer_ids: tuple[int, ...], *, joined: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Drafter and target -> rows, table [N, 3], drafts [N, W - 1] and the target's hidden rows [N, W, H].

        Args:
            rows: int64 [N, 7]: 1 = the state is newer than what follows; entry, first position, anchor, seed, length of
                the prompt, most drafts to accept.
            joined: everything is in one captured pass.
        """
        table = rows[:, 1:4]
        table = torch.where(rows[:, :1] > 0, torch.cat([table[:, :1], state[table[:, 0]]], dim=1), table)
        drafts = table.new_empty(len(table), 0)
        if self.speculator is not None and shape.width > 1:
            drafts = self.speculator.draft_blocks(table, shape, joined=joined)
        hidden, features = self.runner.blocks(torch.cat([table, drafts], dim=1), shape, layer_ids, joined=joined)
        if self.speculator is not None and features is not None:
            self.speculator.inject_blocks(table, features)
        return rows, table, drafts, hidden

    def _choose(self, state: Tensor, *passed: Tensor, sampled: Sequence[Request] = ()) -> tuple[Tensor, Tensor]:
        """The step's tokens and accepted drafts [N, W + 1], and the next state.

        Args:
            passed: from `_passes`.
            sampled: the requests, without padding; none = all are greedy.
        """
        rows, table, drafts, hidden = (each[: len(sampled) or None] for each in passed)
        logits = self.runner.target.logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        first = table[:, 1] + 1 - rows[:, 5]  # tokens of the answer so far
        tokens = self.sampler.choose(sampled, logits, rows[:, 4], first)
        accepted = (drafts == tokens[:, :-1]).long().cumprod(1).sum(1, keepdim=True).minimum(rows[:, 6:])
        anchors = tokens.gather(1, accepted).clamp(min=0)  # a broken token ends its request
        following = torch.cat([table[:, 1:2] + accepted + 1, anchors], dim=1)
        return torch.cat([tokens, accepted], dim=1), state.index_put((table[:, 0],), following)
