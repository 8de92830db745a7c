"""What the slots lose through the target's frozen head, weighted, in bounded memory.

The gradient is made in the forward pass, chunk by chunk: the logits of a step (thousands of rows x the vocabulary)
never exist at once, and nothing is computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_serve.training.slots import Labels, Predictions

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
            slots = torch.arange(valid.shape[1], dtype=probability.dtype, device=valid.device)
            return torch.exp(-slots / self.gamma) * valid
        survival = ((1 - self.alpha) * probability + self.alpha).cumprod(1) * valid
        return survival.flip(1).cumsum(1).flip(1) * valid


class SlotScores(NamedTuple):
    """What a step's slots scored; all [blocks, B-1]."""

    cross_entropy: Tensor
    weights: Tensor
    hit: Tensor
    distance: Tensor | None = None
    """Sum of |q - p| over the vocabulary, 0..2; None where the target's distribution is not asked for."""

    @property
    def acceptance(self) -> Tensor:
        """How likely each slot is accepted, those before it given: a sampled draft, or the likeliest token where only
        the answer's tokens are known.
        """
        return self.hit.float() if self.distance is None else (1 - self.distance / 2).clamp(0, 1)


def confidence_loss(confidence: Tensor, scores: SlotScores) -> Tensor:
    """Binary cross-entropy of the confidence head's logits [blocks, B-1], weighted as the slots."""
    weights = scores.weights
    loss = F.binary_cross_entropy_with_logits(confidence, scores.acceptance, weight=weights, reduction="sum")
    return loss / weights.sum().clamp(min=1e-9)


class _Parts(NamedTuple):
    """A chunk of blocks: `hidden`, `latent` and `teacher` as flat rows, `targets` and `valid` [blocks, B-1]."""

    hidden: Tensor
    latent: Tensor | None
    teacher: Tensor | None
    targets: Tensor
    valid: Tensor


class SlotLoss:
    """The loss of a step through a frozen head, and its scores.

    Args:
        head: [vocabulary, H]; bf16 makes the products fast.
        soft: share of sum |q - p| in the loss, the rest is cross-entropy; its labels must have a teacher.
        kept: token ids int64 that the softmax runs over; None = all.
        blocks_at_once: blocks whose logits exist together.
    """

    def __init__(
        self,
        head: Tensor,
        weighting: Weighting,
        *,
        soft: float = 0.0,
        kept: Tensor | None = None,
        blocks_at_once: int = BLOCKS_AT_ONCE,
    ) -> None:
        self.weighting, self.soft, self.kept, self.blocks_at_once = weighting, soft, kept, blocks_at_once
        self.head = head if kept is None else head[kept].contiguous()
        self.places: Tensor | None = None
        """Each token's row of the head, where some are left out."""
        if kept is not None:
            self.places = torch.zeros(len(head), dtype=torch.int64, device=head.device)
            self.places[kept] = torch.arange(len(kept), device=head.device)
        self.rooms: dict[str, Tensor] = {}

    def __call__(self, predictions: Predictions, labels: Labels) -> tuple[Tensor, SlotScores]:
        """The weighted mean of the slots' losses, a scalar, differentiable in hidden, latent and bias; and the scores.

        The confidence head has a loss of its own (`confidence_loss`).
        """
        bias = self._rows(predictions.bias)
        loss, *scores = _SlotLoss.apply(predictions.hidden, predictions.latent, bias, labels, self)  # type: ignore[no-untyped-call]
        return loss, SlotScores(*scores)

    @torch.no_grad()
    def scores(self, predictions: Predictions, labels: Labels) -> SlotScores:
        """The scores alone."""
        bias = self._rows(predictions.bias)
        found = [self._measure(part, bias)[0] for part in self._chunks(predictions.hidden, predictions.latent, labels)]
        return _joined(found)

    def scores_and_gradient(
        self, hidden: Tensor, latent: Tensor | None, bias: Tensor | None, labels: Labels
    ) -> tuple[SlotScores, list[Tensor | None]]:
        """Scores, and the gradients of the weighted sum of losses, in the order of the arguments and like them.

        Args:
            bias: of the rows of the head that are kept.
        """
        found, rows, latents = [], [], []
        gradient = None if bias is None else torch.zeros_like(bias)
        for part in self._chunks(hidden, latent, labels):
            scores, slope = self._measure(part, bias, sloped=True)
            found.append(scores)
            slope = slope.to(self.head.dtype)
            rows.append((slope @ self.head).to(hidden.dtype))
            if part.latent is not None and bias is not None and gradient is not None:
                latents.append((slope @ bias.to(slope.dtype)).to(part.latent.dtype))
                gradient += slope.t() @ part.latent.to(slope.dtype)
        of_latent = None if latent is None else torch.cat(latents).view_as(latent)
        return _joined(found), [torch.cat(rows).view_as(hidden), of_latent, gradient]

    def _rows(self, bias: Tensor | None) -> Tensor | None:
        return bias if bias is None or self.kept is None else bias[self.kept]

    def _chunks(self, hidden: Tensor, latent: Tensor | None, labels: Labels) -> list[_Parts]:
        targets = labels.targets if self.places is None else self.places[labels.targets]
        chunks = []
        for first in range(0, len(hidden), self.blocks_at_once):
            own = slice(first, first + self.blocks_at_once)
            flat = [None if rows is None else rows[own].flatten(0, 1) for rows in (latent, labels.teacher)]
            chunks.append(_Parts(hidden[own].flatten(0, 1), flat[0], flat[1], targets[own], labels.valid[own]))
        return chunks

    def _measure(self, part: _Parts, bias: Tensor | None, *, sloped: bool = False) -> tuple[SlotScores, Tensor]:
        """Scores, and [rows, vocabulary] in memory of ours: where `sloped`, the weighted loss's slope in the logits."""
        flat, like = part.targets.view(-1, 1), part.targets
        logits = self._logits("drafter", part.hidden)
        if part.latent is not None and bias is not None:
            logits += part.latent.to(self.head.dtype) @ bias.t().to(self.head.dtype)
        best, chosen = logits.argmax(-1, keepdim=True), logits.gather(1, flat)
        total = _softmax_(logits)
        cross_entropy = (total - chosen).view_as(like)
        weights = self.weighting(torch.exp(-cross_entropy), part.valid)
        scores = SlotScores(cross_entropy, weights, (best == flat).view_as(like) & part.valid)
        if not self.soft:
            # d(w ce)/d(logits) = w (q - onehot)
            scale = weights.view(-1, 1)
            return scores, logits.mul_(scale).scatter_add_(1, flat, -scale) if sloped else logits
        return self._softened(part, scores, logits, sloped)

    def _softened(self, part: _Parts, scores: SlotScores, q: Tensor, sloped: bool) -> tuple[SlotScores, Tensor]:
        """The same with the distance from the target's distribution: d(sum |q - p|)/d(logits) = q (s - sum q s), s the
        sign of q - p.
        """
        assert part.teacher is not None
        p = self._logits("target", part.teacher)
        _softmax_(p)
        apart = torch.sub(q, p, out=p)
        scores = scores._replace(distance=apart.abs().sum(-1).view_as(part.targets))
        if sloped:
            sign, scale = apart.sign_(), scores.weights.view(-1, 1)
            mean = (q * sign).sum(-1, keepdim=True)
            q.mul_(sign.sub_(mean).mul_(self.soft).add_(1 - self.soft).mul_(scale))
            q.scatter_add_(1, part.targets.view(-1, 1), -scale * (1 - self.soft))
        return scores, q

    def _logits(self, whose: str, rows: Tensor) -> Tensor:
        """In memory kept between steps: to take 20 MB anew from the system costs a CPU more than to fill them."""
        room = self.rooms.get(whose)
        if room is None or len(room) < len(rows):
            dtype = torch.promote_types(self.head.dtype, torch.float32)
            room = torch.empty(len(rows), len(self.head), dtype=dtype, device=self.head.device)
            self.rooms[whose] = room
        return room[: len(rows)].copy_(rows.to(self.head.dtype) @ self.head.t())


def _softmax_(logits: Tensor) -> Tensor:
    """Replaces logits [rows, vocabulary] by their softmax; returns the logarithms of their sums, [rows, 1]."""
    highest = logits.amax(-1, keepdim=True)
    total = logits.sub_(highest).exp_().sum(-1, keepdim=True)
    logits.div_(total)
    return highest + total.log()


def _joined(chunks: list[SlotScores]) -> SlotScores:
    """Those of all blocks."""
    distances = [chunk.distance for chunk in chunks if chunk.distance is not None]
    return SlotScores(
        cross_entropy=torch.cat([chunk.cross_entropy for chunk in chunks]),
        weights=torch.cat([chunk.weights for chunk in chunks]),
        hit=torch.cat([chunk.hit for chunk in chunks]),
        distance=torch.cat(distances) if distances else None,
    )


class _SlotLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, latent: Tensor | None, bias: Tensor | None, labels: Labels, loss: SlotLoss
    ) -> tuple[Tensor | None, ...]:
        scores, gradients = loss.scores_and_gradient(hidden, latent, bias, labels)
        total = scores.weights.sum()
        ctx.save_for_backward(total, *gradients)
        ctx.mark_non_differentiable(*(part for part in scores if part is not None))
        each = scores.cross_entropy
        if scores.distance is not None:
            each = (1 - loss.soft) * each + loss.soft * scores.distance
        return (each * scores.weights).sum() / total, *scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        total, *gradients = ctx.saved_tensors
        scale = grad_loss / total
        return *(None if each is None else each * scale.to(each.dtype) for each in gradients), None, None
