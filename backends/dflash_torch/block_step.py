"""Decoding steps that stay on the device, so that each is launched before the tokens of the step before are read.

The next step needs each request's anchor and first position. Both are on the device when a step ends, so its successor
is launched at once, and the host reads tokens, learns, decides and delivers text while the device works:

    a `BlockRow` of each request from the host, state [entries, 2] of the step before -> position and anchor
    -> drafter -> target -> features of all rows into the drafter's cache
    -> tokens by argmax or by seeded draws -> accepted = leading drafts that equal them -> state

Two captured passes do this: one up to the target's hidden rows, and one that chooses. The choice of a sampled step is
not captured. The state is written last and lies outside the graphs' memory, so other graphs may run between two steps.

Every request has its own width: a limit on the drafts that it accepts. A step is padded to the widest of them. Requests
with short and with long contexts may run in two passes, each of which is a `LaunchedStep`. A request that ended in the
step before takes part in one step for nothing. Requests that need the host between steps cannot run so
(`BlockSteps.holds`); they run beside these steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from dflash_serve.models.kv_cache import Span, to_device
from dflash_serve.speculation.acceptance import count_accepted

from .model_runner import Fetched, Shape, TargetRunner, at_least
from .request import BROKEN, LaunchedStep, Part, Passed, Request, in_flight
from .sampler import Sampler, likeliest
from .speculator import Speculator

T = TypeVar("T", int, Tensor)


class BlockRow(NamedTuple, Generic[T]):
    """The host's knowledge of one block: a row of an int64 tensor, or its columns [N] for N blocks.

    With the drafts behind it, the end of a row (entry, position, anchor) is the target's input.
    """

    seed: T
    prompt_length: T
    most_drafts: T  # drafted tokens that may be accepted
    limit: T  # length of prompt and answer together at which the request ends
    in_flight: T  # 1 = the state on the device is newer than position and anchor
    entry: T
    position: T  # of the anchor
    anchor: T


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
            empty = BlockRow(0, 0, 0, end, in_flight=0, entry=0, position=first, anchor=0)
            rows = [empty._replace(entry=entry) for entry in range(shape.requests)]
            self._choose(self._passes(rows, shape, features), [])

    def holds(self, request: Request) -> bool:
        """The request needs no host between its steps: its tokens depend on logits and seeds alone."""
        return self.possible and request.unconstrained and request.params.logprobs is None

    def launch(
        self,
        requests: Sequence[Request],
        widths: Mapping[int, int],
        before: Sequence[LaunchedStep],
        layer_ids: tuple[int, ...],
    ) -> list[LaunchedStep]:
        """Launches a step of each request, in one or two passes; it does not wait for the device.

        Args:
            widths: of the requests, by id.
            before: the steps before, if their tokens are not read yet.
            layer_ids: the target's layers whose features the next draft needs.
        """
        flying = in_flight(before)
        # The drafter's pass reads a whole block at any width. No block begins behind the end of its answer.
        starts = [min(each.verified + flying.get(each.id, 0), each.limit - 1) for each in requests]
        spans = [Span(each.entry, start, self.runner.widest) for each, start in zip(requests, starts, strict=True)]
        if self.speculator is not None and layer_ids:
            self.speculator.inject(requests)
        steps = list[LaunchedStep]()
        for places in self.runner.shapes.parts(spans):
            for step in (*before, *steps):
                self.choose(step)  # before the next pass overwrites what it chooses from
            shape = self.runner.shapes.fit([spans[n] for n in places])
            assert shape is not None
            parts = [Part(requests[n], widths[requests[n].id], injects=bool(layer_ids)) for n in places]
            steps.append(self._launch(parts, shape, flying, layer_ids))
        return steps

    def _launch(
        self, parts: list[Part], shape: Shape, flying: Collection[int], layer_ids: tuple[int, ...]
    ) -> LaunchedStep:
        shape = shape._replace(width=at_least(max(part.width for part in parts), 1, self.runner.widest))
        rows = [
            BlockRow(
                seed=request.seed,
                prompt_length=request.prompt_length,
                most_drafts=width - 1,
                limit=request.limit,
                in_flight=request.id in flying,
                entry=request.entry,
                position=request.verified,
                anchor=request.token_ids[-1],
            )
            for request, width in ((part.request, part.width) for part in parts)
        ]
        # The last row is repeated: it writes the same K/V again.
        rows += rows[-1:] * (shape.requests - len(rows))
        step = LaunchedStep(parts, passed=self._passes(rows, shape, layer_ids))
        if all(part.request.params.greedy or part.request.params.top_p == 1 for part in parts):
            self.choose(step)
        return step

    def _passes(self, rows: Sequence[BlockRow[int]], shape: Shape, layer_ids: tuple[int, ...]) -> Passed:
        """Drafter and target. `known`: the rows with the newest positions and anchors, then the drafts [N, 8 + W - 1].

        `hidden` is [N, W, H].
        """

        def work(rows: Tensor) -> tuple[Tensor, Tensor]:
            row = BlockRow(*rows.unbind(1))
            newest = torch.where(row.in_flight[:, None] > 0, self.runner.state[row.entry], rows[:, -2:])
            known = torch.cat([rows[:, :-2], newest], dim=1)
            blocks = known[:, -3:]
            if self.speculator is not None and shape.width > 1:
                drafts = self.speculator.draft_blocks(blocks, shape)
                known = torch.cat([known, drafts], dim=1)
            hidden, *features = self.runner.blocks(known[:, rows.shape[1] - 3 :], shape, layer_ids)
            if self.speculator is not None and features:
                self.speculator.inject_blocks(blocks, features[0].unflatten(0, shape[:2]))
            return known, hidden.unflatten(0, shape[:2])

        table = to_device(rows, self.runner.cache.keys.device)
        return Passed(shape, *self.runner.run(shape, ("blocks", layer_ids), work, table))

    def choose(self, step: LaunchedStep) -> None:
        """Chooses a step's tokens, unless it is done already: they go to the host, and the next state is written.

        Only the choice of a request with `top_p` may wait for the device.
        """
        if step.passed is None:
            return
        requests = [part.request for part in step.parts]
        greedy = all(request.params.greedy for request in requests)
        choices = self._choose(step.passed, [] if greedy else requests)
        step.tokens, step.passed = Fetched(choices[: len(requests)]), None

    def _choose(self, passed: Passed, sampled: Sequence[Request]) -> Tensor:  # captured if all are greedy
        if sampled:
            return self._accept(passed.known[: len(sampled)], passed.hidden[: len(sampled)], sampled)
        shape, known, hidden = passed

        def work(known: Tensor, hidden: Tensor) -> tuple[Tensor]:
            return (self._accept(known, hidden, []),)

        any_length = shape._replace(length=0)
        return self.runner.run(any_length, "choice", work, known, hidden, changes=[self.runner.state])[0]

    def _accept(self, known: Tensor, hidden: Tensor, sampled: Sequence[Request]) -> Tensor:
        """The step's tokens and accepted drafts [N, W + 1], as `LaunchedStep.gained` reads; writes the next state.

        Args:
            known, hidden: from `_passes`.
            sampled: the requests, without padding; none = all are greedy.
        """
        facts = len(BlockRow._fields)
        row, drafts = BlockRow(*known[:, :facts].unbind(1)), known[:, facts:]
        logits = self.runner.target.logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        if sampled:
            first = row.position + 1 - row.prompt_length  # tokens of the answer so far
            tokens = self.sampler.own_tokens(sampled, logits, drafts, row.seed, first)
            tokens = tokens.masked_fill(~logits.amax(-1).isfinite(), BROKEN)
        else:
            tokens = likeliest(logits)
        room = (row.limit - row.position - 2).clamp(min=0)  # for drafts, beside the bonus token
        accepted = count_accepted(drafts, tokens, torch.minimum(row.most_drafts, room))[:, None]
        anchors = tokens.gather(1, accepted).clamp(min=0)  # a broken token ends its request
        following = torch.cat([row.position[:, None] + accepted + 1, anchors], dim=1)
        choices = torch.cat([tokens, accepted], dim=1)
        self.runner.state.index_put_((row.entry,), following)
        return choices
