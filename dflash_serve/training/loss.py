"""Cross-entropy of the slots through the target's frozen head, weighted, in bounded memory.

The gradient is made in the forward pass, chunk by chunk: the logits of a step (thousands of rows x the vocabulary) never
exist at once, and nothing is computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCKS_AT_ONCE = 64


@dataclass(frozen=True)
class Weighting:
    """How much each slot counts: D-PACE (arXiv 2605.18810) with `alpha`, or exp(-(k-1)/gamma) where alpha is None."""

    alpha: float | None = 0.5
    gamma: float = 4.0

    def __call__(self, probability: Tensor, valid: Tensor) -> Tensor:
        """Weights [blocks, B-1] of slots 1..B-1 from the drafter's probability of the right tokens; 0 where not valid.

        D-PACE: q_j = (1-a) p_j + a, w_j = sum over m >= j of prod over i <= m of q_i: a slot counts as far as the slots up
        to it, and those behind it, are likely to be accepted.
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


def block_loss(
    hidden: Tensor, head: Tensor, targets: Tensor, valid: Tensor, weighting: Weighting
) -> tuple[Tensor, SlotScores]:
    """The weighted mean cross-entropy of a step, and its scores.

    Args:
        hidden: [blocks, B-1, H] of slots 1..B-1, after the drafter's final norm.
        head: [vocabulary, H], frozen; bf16 makes the products fast.
        targets: rows of `head`, int64 [blocks, B-1]; ignored where not `valid`.

    Returns:
        scalar fp32 loss (differentiable in `hidden`), scores.
    """
    loss, *scores = _BlockLoss.apply(hidden, head, targets, valid, weighting)  # type: ignore[no-untyped-call]
    return loss, SlotScores(*scores)


@torch.no_grad()
def slot_scores(hidden: Tensor, head: Tensor, targets: Tensor, valid: Tensor, weighting: Weighting) -> SlotScores:
    """The scores alone, without a gradient; arguments as in `block_loss`."""
    parts = []
    for first in range(0, len(hidden), BLOCKS_AT_ONCE):
        part = slice(first, first + BLOCKS_AT_ONCE)
        logits = (hidden[part].to(head.dtype) @ head.t()).float()
        cross_entropy = F.cross_entropy(logits.flatten(0, 1), targets[part].flatten(), reduction="none")
        cross_entropy = cross_entropy.view_as(targets[part])
        weights = weighting(torch.exp(-cross_entropy), valid[part])
        parts.append((cross_entropy, weights, (logits.argmax(-1) == targets[part]) & valid[part]))
    return SlotScores(*(torch.cat(column) for column in zip(*parts, strict=True)))


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, valid: Tensor, weighting: Weighting
    ) -> tuple[Tensor, ...]:
        gradient = torch.empty_like(hidden)
        scores = []
        for first in range(0, len(hidden), BLOCKS_AT_ONCE):
            part = slice(first, first + BLOCKS_AT_ONCE)
            *score, gradient[part] = _chunk(hidden[part], head, targets[part], valid[part], weighting)
            scores.append(score)
        cross_entropy, weights, hit = (torch.cat(parts) for parts in zip(*scores, strict=True))
        total = weights.sum()
        ctx.save_for_backward(gradient, total)
        ctx.mark_non_differentiable(cross_entropy, weights, hit)
        return (cross_entropy * weights).sum() / total, cross_entropy, weights, hit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradient, total = ctx.saved_tensors
        return gradient * (grad_loss / total).to(gradient.dtype), None, None, None, None


def _chunk(
    hidden: Tensor, head: Tensor, targets: Tensor, valid: Tensor, weighting: Weighting
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cross-entropy, weights, hits [blocks, B-1] and the unnormalised gradient [blocks, B-1, H] of some blocks."""
    shape, rows, flat = targets.shape, hidden.flatten(0, 1).to(head.dtype), targets.flatten()[:, None]
    logits = (rows @ head.t()).float()
    highest, best = logits.max(-1, keepdim=True)
    hit = (best == flat).view(shape) & valid
    chosen = logits.gather(1, flat)
    exponentials = logits.sub_(highest).exp_()
    total = exponentials.sum(-1, keepdim=True)
    cross_entropy = (highest + total.log() - chosen).view(shape)
    weights = weighting(torch.exp(-cross_entropy), valid)
    # d(w * ce)/d(logits) = w * (softmax - onehot)
    scale = weights.view(-1, 1)
    gradient = exponentials.mul_(scale / total).scatter_add_(1, flat, -scale)
    return cross_entropy, weights, hit, (gradient.to(head.dtype) @ head).view_as(hidden).to(hidden.dtype)
