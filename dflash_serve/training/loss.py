"""Cross-entropy of the slots through the target's frozen head, weighted, in bounded memory.

The gradient is made in the forward pass, chunk by chunk: the logits of a step (thousands of rows x the vocabulary)
never exist at once, and nothing is computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCKS_AT_ONCE = 32


@dataclass(frozen=True)
class Weighting:
    """How much each slot counts: D-PACE (arXiv 2605.18810) with `alpha`, or exp(-(k-1)/gamma) where alpha is None."""

    alpha: float | None = 0.5
    gamma: float = 4.0

    def __call__(self, probability: Tensor, valid: Tensor) -> Tensor:
        """Weights [blocks, B-1] of slots 1..B-1 from the drafter's probability of the right tokens; 0 where not valid.

        D-PACE: q_j = (1-a) p_j + a, w_j = sum over m >= j of prod over i <= m of q_i: a slot counts as far as the slots
        up to it, and those behind it, are likely to be accepted.
        """
        if self.alpha is None:
            slots = torch.arange(valid.shape[1], device=valid.device)
            return torch.exp(-slots / self.gamma) * valid
        survival = ((1 - self.alpha) * probability + self.alpha).cumprod(1) * valid
        return survival.flip(1).cumsum(1).flip(1) * valid


@dataclass(frozen=True)
class SlotScores:
    """What a step's slots scored; all [blocks, B-1]."""

    cross_entropy: Tensor
    weights: Tensor
    hit: Tensor


class SlotLoss:
    """The loss of a step through a frozen head, and its scores.

    Args:
        head: [vocabulary, H]; bf16 makes the products fast.
        blocks_at_once: blocks whose logits exist together.
    """

    def __init__(self, head: Tensor, weighting: Weighting, *, blocks_at_once: int = BLOCKS_AT_ONCE) -> None:
        self.head, self.weighting, self.blocks_at_once = head, weighting, blocks_at_once
        self.room: Tensor | None = None

    def __call__(self, hidden: Tensor, targets: Tensor, valid: Tensor) -> tuple[Tensor, SlotScores]:
        """Weighted mean cross-entropy.

        Args:
            hidden: [blocks, B-1, H] of slots 1..B-1, after the drafter's final norm.
            targets: rows of the head, int64 [blocks, B-1]; ignored where not `valid`.

        Returns:
            scalar fp32 loss (differentiable in `hidden`), scores.
        """
        loss, *scores = _SlotLoss.apply(hidden, targets, valid, self)  # type: ignore[no-untyped-call]
        return loss, SlotScores(*scores)

    @torch.no_grad()
    def scores(self, hidden: Tensor, targets: Tensor, valid: Tensor) -> SlotScores:
        """The scores alone."""
        return SlotScores(*self._chunked(hidden, targets, valid, gradient=False))

    def scores_and_gradient(self, hidden: Tensor, targets: Tensor, valid: Tensor) -> tuple[SlotScores, Tensor]:
        """Scores, and the gradient [blocks, B-1, H] of the weighted sum of cross-entropies."""
        *scores, gradient = self._chunked(hidden, targets, valid, gradient=True)
        return SlotScores(*scores), gradient

    def _chunked(self, hidden: Tensor, targets: Tensor, valid: Tensor, *, gradient: bool) -> list[Tensor]:
        """The fields of `SlotScores` and, where asked for, the gradient; `blocks_at_once` blocks at a time."""
        chunks = []
        parts = (whole.split(self.blocks_at_once) for whole in (hidden, targets, valid))
        for states, wanted, real in zip(*parts, strict=True):
            cross_entropy, hit, softmax = self._measure(states, wanted, real)
            weights = self.weighting(torch.exp(-cross_entropy), real)
            found = [cross_entropy, weights, hit]
            if gradient:  # d(w * ce)/d(logits) = w * (softmax - onehot)
                scale = weights.view(-1, 1)
                slope = softmax.mul_(scale).scatter_add_(1, wanted.view(-1, 1), -scale)
                found.append((slope.to(self.head.dtype) @ self.head).view_as(states).to(hidden.dtype))
            chunks.append(found)
        return [torch.cat(column) for column in zip(*chunks, strict=True)]

    def _measure(self, hidden: Tensor, targets: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cross-entropy and hits [blocks, B-1], and the softmax [blocks * (B-1), vocabulary] in memory of ours."""
        rows, flat = hidden.flatten(0, 1).to(self.head.dtype), targets.view(-1, 1)
        logits = self._room(len(rows)).copy_(rows @ self.head.t())
        highest, best = logits.max(-1, keepdim=True)
        chosen = logits.gather(1, flat)
        exponentials = logits.sub_(highest).exp_()
        total = exponentials.sum(-1, keepdim=True)
        cross_entropy = (highest + total.log() - chosen).view_as(targets)
        return cross_entropy, (best == flat).view_as(targets) & valid, exponentials.div_(total)

    def _room(self, rows: int) -> Tensor:
        """Kept between steps: to take 20 MB anew from the system costs a CPU more than to fill them."""
        if self.room is None or len(self.room) < rows:
            self.room = torch.empty(rows, len(self.head), device=self.head.device)
        return self.room[:rows]


class _SlotLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, valid: Tensor, loss: SlotLoss) -> tuple[Tensor, ...]:
        scores, gradient = loss.scores_and_gradient(hidden.detach(), targets, valid)
        total = scores.weights.sum()
        ctx.save_for_backward(gradient, total)
        ctx.mark_non_differentiable(scores.cross_entropy, scores.weights, scores.hit)
        mean = (scores.cross_entropy * scores.weights).sum() / total
        return mean, scores.cross_entropy, scores.weights, scores.hit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradient, total = ctx.saved_tensors
        return gradient * (grad_loss / total).to(gradient.dtype), None, None, None
