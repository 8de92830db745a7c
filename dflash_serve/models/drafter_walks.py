"""Proposals of drafters whose slots hang on one another: chosen from left to right, for all blocks at once.

Each slot is an argmax at every temperature, so a draft is a point mass and sampling stays lossless with any width
(`speculation.acceptance`). A grammar filters a slot's scores before the choice, slot by slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dflash_serve.models.drafter import Drafter, Head, SlotFilter

FORBIDDEN = float("-inf")


class Walk(ABC):
    """One walk over the slots of n blocks.

    Args:
        drafter: whose heads they are.
        hidden: [n, slots, H] after the final norm.
        logits: [n, slots, Vd] of the drafter's.
    """

    def __init__(self, drafter: Drafter, hidden: Tensor, logits: Tensor) -> None:
        self.drafter, self.hidden, self.logits = drafter, hidden, logits

    @abstractmethod
    def choose(self, slot: int, previous: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Target ids [n] for a slot, asked for in order.

        Args:
            slot: from 0.
            previous: target ids [n] of the slot before; the anchors at the first.
            allowed: bool [V], what a grammar allows here; None = everything.
        """


class MarkovWalk(Walk):
    """Adds the Markov head's bias to each slot's logits; without one, each slot's own argmax."""

    state: Tensor | None = None

    def choose(self, slot: int, previous: Tensor, allowed: Tensor | None = None) -> Tensor:
        scores, head = self.logits[:, slot], self.drafter.markov_head
        if head is not None:
            bias, self.state = head(previous, self.hidden[:, slot], self.state)
            scores = scores + bias
        if allowed is not None:
            scores = scores.masked_fill(~self._draftable(allowed), FORBIDDEN)
        return self.drafter.target_ids(scores.argmax(dim=-1))

    def _draftable(self, allowed: Tensor) -> Tensor:
        """Bool [Vd] from bool [V]."""
        return allowed if self.drafter.token_ids is None else allowed[self.drafter.token_ids]


class SelectorWalk(Walk):
    """Chooses among each slot's likeliest tokens by the selector's scores."""

    def __init__(self, drafter: Drafter, hidden: Tensor, logits: Tensor) -> None:
        super().__init__(drafter, hidden, logits)
        assert drafter.candidate_selector is not None
        self.selector = drafter.candidate_selector
        self.projected = self.selector.hidden_projection(hidden)
        self.scores, self.candidates = torch.topk(logits, self.selector.top_k, dim=-1)

    def choose(self, slot: int, previous: Tensor, allowed: Tensor | None = None) -> Tensor:
        scores, candidates = self.scores[:, slot], self.candidates[:, slot]
        if allowed is not None:
            filtered = self.logits[:, slot].masked_fill(~allowed, FORBIDDEN)
            scores, candidates = torch.topk(filtered, self.selector.top_k, dim=-1)
        best = self.selector(scores, candidates, previous, self.projected[:, slot]).argmax(dim=-1, keepdim=True)
        return candidates.gather(-1, best)[:, 0]


def propose_by_walk(
    drafter: Drafter,
    head: Head,
    hidden: Tensor,
    anchors: Sequence[int],
    counts: Sequence[int],
    filters: Sequence[SlotFilter | None],
) -> list[list[int]]:
    """A `models.drafter.Proposal`. Blocks under a grammar walk alone; the others together, padded to the most slots."""
    logits = drafter.adjust_logits((drafter.lm_head or head)(hidden))
    kind = MarkovWalk if drafter.candidate_selector is None else SelectorWalk
    starts = [sum(counts[:index]) for index in range(len(counts))]
    drafts: list[list[int]] = [[] for _ in counts]
    free = [index for index, grammar in enumerate(filters) if grammar is None]
    if free:
        rows = _padded_rows([starts[i] for i in free], [counts[i] for i in free], hidden.device)
        walk = kind(drafter, hidden[rows], logits[rows])
        path = _whole_path(walk, [anchors[i] for i in free], rows.shape[1])
        for index, tokens in zip(free, path, strict=True):
            drafts[index] = tokens[: counts[index]]
    for index, grammar in enumerate(filters):
        if grammar is not None:
            own = slice(starts[index], starts[index] + counts[index])
            walk = kind(drafter, hidden[None, own], logits[None, own])
            drafts[index] = grammar.fill(counts[index], _chooser(walk, anchors[index]))
    return drafts


def _padded_rows(starts: Sequence[int], counts: Sequence[int], device: torch.device) -> Tensor:
    """Rows [n, most slots] of the flat batch; a block with fewer slots repeats its last one."""
    most = max(counts)
    rows = [[s + min(k, c - 1) for k in range(most)] for s, c in zip(starts, counts, strict=True)]
    return torch.tensor(rows, device=device)


def _whole_path(walk: Walk, anchors: Sequence[int], slots: int) -> list[list[int]]:
    previous, path = torch.tensor(anchors, device=walk.hidden.device), []
    for slot in range(slots):
        previous = walk.choose(slot, previous)
        path.append(previous)
    chosen: list[list[int]] = torch.stack(path, dim=1).tolist()
    return chosen


def _chooser(walk: Walk, anchor: int) -> Callable[[Sequence[int], Tensor], int]:
    """What a grammar asks for each slot: (the draft so far, what is allowed) -> a token."""

    def choose(draft: Sequence[int], allowed: Tensor) -> int:
        previous = torch.tensor([draft[-1] if draft else anchor], device=walk.hidden.device)
        return int(walk.choose(len(draft), previous, allowed.to(walk.hidden.device)))

    return choose
