"""The slots' weighted loss through the target's frozen head, in bounded memory.

The loss of a slot is the cross-entropy of the answer's token, mixed by the share `soft` with the soft loss: sum |q - p|
over the vocabulary, twice the total variation between the drafter's distribution q and the target's p (as in DSpark).
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

from dflash_serve.training.blocks import Labels, Predictions

BLOCKS_AT_ONCE = 32


@dataclass(frozen=True)
class Weighting:
    """Weights of the slots: D-PACE (arXiv 2605.18810) with `alpha`, or exp(-(k-1)/gamma) without."""

    alpha: float | None = 0.5
    gamma: float = 4.0

    def __call__(self, probability: Tensor, valid: Tensor) -> Tensor:
        """Weights [blocks, B-1] of slots 1..B-1 from the drafter's probability of the right tokens; 0 where not valid.

        D-PACE: q_j = (1-a) p_j + a, w_j = sum over m >= j of prod over i <= m of q_i: the expected number of accepted
        slots from this one on.
        """
        if self.alpha is None:
            slots = torch.arange(valid.shape[1], dtype=probability.dtype, device=valid.device)
            return torch.exp(-slots / self.gamma) * valid
        survival = ((1 - self.alpha) * probability + self.alpha).cumprod(1) * valid
        return survival.flip(1).cumsum(1).flip(1) * valid


class SlotScores(NamedTuple):
    """Scores of a step's slots, all [blocks, B-1]."""

    cross_entropy: Tensor
    weights: Tensor
    hit: Tensor
    distance: Tensor | None = None  # the soft loss, sum of |q - p| over the vocabulary, 0..2; None without soft labels

    @property
    def acceptance(self) -> Tensor:
        """Probability that each slot is accepted if the slots before it are.

        It is that of a sampled draft with soft labels, and 0 or 1 for the likeliest token without.
        """
        return self.hit.float() if self.distance is None else (1 - self.distance / 2).clamp(0, 1)


def confidence_loss(confidence: Tensor, scores: SlotScores) -> Tensor:
    """Binary cross-entropy of the confidence head's logits [blocks, B-1], weighted as the slots."""
    weights = scores.weights
    loss = F.binary_cross_entropy_with_logits(confidence, scores.acceptance, weight=weights, reduction="sum")
    return loss / weights.sum().clamp(min=1e-9)


class _Parts(NamedTuple):
    """A chunk of blocks: of the slots that count `hidden`, `latent`, `teacher` and `targets` as flat rows, and `at`,
    where they stand among the flat slots; `valid` [blocks, B-1].
    """

    hidden: Tensor
    latent: Tensor | None
    teacher: Tensor | None
    targets: Tensor
    at: Tensor
    valid: Tensor

    def spread(self, rows: Tensor) -> Tensor:
        """[rows] or [rows, 1] of the slots that count as [blocks, B-1], zero elsewhere."""
        whole = rows.new_zeros(self.valid.numel())
        return whole.index_copy_(0, self.at, rows.flatten()).view_as(self.valid)


class SlotLoss:
    """The loss of a step through a frozen head, and its scores.

    Args:
        head: [vocabulary, H]; bf16 makes the products fast.
        soft: share of the soft loss in the loss, the rest is cross-entropy; its labels must have a teacher.
        kept: token ids int64 that the softmax runs over; None = all.
        blocks_at_once: so many whole blocks' logits exist together, or of blocks that end early more of them.
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
        self.weighting, self.soft = weighting, soft
        self.kept, self.blocks_at_once = kept, blocks_at_once
        self.head = head if kept is None else head[kept].contiguous()
        self.places: Tensor | None = None  # each token's row of the head, where some are left out; -1 = this one
        if kept is not None:
            self.places = torch.full((len(head),), -1, dtype=torch.int64, device=head.device)
            self.places[kept] = torch.arange(len(kept), device=head.device)
        self.rooms: dict[str, Tensor] = {}

    def __call__(self, predictions: Predictions, labels: Labels) -> tuple[Tensor, SlotScores]:
        """The weighted mean of the slots' losses, a scalar, differentiable in hidden, latent and bias; and the scores.

        The confidence head has a loss of its own (`confidence_loss`).
        """
        bias = self._rows(predictions.bias)
        loss, *scores = _SlotLoss.apply(predictions.hidden, predictions.latent, bias, labels, self)  # type: ignore[no-untyped-call]
        return loss, SlotScores(*scores)

    def knows(self, targets: Tensor) -> Tensor:
        """True for tokens that the softmax runs over; slots of other tokens must not be valid."""
        return torch.ones_like(targets, dtype=torch.bool) if self.places is None else self.places[targets] >= 0

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
        found, gradients = [], [torch.zeros_like(hidden), None if latent is None else torch.zeros_like(latent)]
        of_bias = None if bias is None else torch.zeros_like(bias)
        first = 0
        for part in self._chunks(hidden, latent, labels):
            scores, slope = self._measure(part, bias, sloped=True)
            found.append(scores)
            slope = slope.to(self.head.dtype)
            own, first = slice(first, first + len(part.valid)), first + len(part.valid)
            _put(gradients[0], own, part.at, slope @ self.head)
            if part.latent is not None and bias is not None and of_bias is not None:
                _put(gradients[1], own, part.at, slope @ bias.to(slope.dtype))
                of_bias += slope.t() @ part.latent.to(slope.dtype)
        return _joined(found), [*gradients, of_bias]

    def _rows(self, bias: Tensor | None) -> Tensor | None:
        return bias if bias is None or self.kept is None else bias[self.kept]

    def _chunks(self, hidden: Tensor, latent: Tensor | None, labels: Labels) -> list[_Parts]:
        targets = labels.targets if self.places is None else self.places[labels.targets]
        most = self.blocks_at_once * labels.valid.shape[1]
        numbers = (labels.valid.sum(1).cumsum(0) - 1).clamp(min=0).div(most, rounding_mode="floor")
        sizes = [size for size in numbers.bincount().tolist() if size]
        chunks, first = [], 0
        for size in sizes:
            own, first = slice(first, first + size), first + size
            at = labels.valid[own].flatten().nonzero()[:, 0]
            both = (latent, labels.teacher)
            latents, teachers = (each if each is None else each[own].flatten(0, 1)[at] for each in both)
            rows = hidden[own].flatten(0, 1)[at]
            chunks.append(_Parts(rows, latents, teachers, targets[own].flatten()[at], at, labels.valid[own]))
        return chunks

    def _measure(self, part: _Parts, bias: Tensor | None, *, sloped: bool = False) -> tuple[SlotScores, Tensor]:
        """Scores, and [rows, vocabulary] in reused memory: with `sloped`, the gradient of the loss in the logits."""
        targets = part.targets[:, None]
        logits = self._logits("drafter", part.hidden)
        if part.latent is not None and bias is not None:
            logits += part.latent.to(self.head.dtype) @ bias.t().to(self.head.dtype)
        best, chosen = logits.argmax(-1, keepdim=True), logits.gather(1, targets)
        wanted = None
        if self.soft:
            assert part.teacher is not None
            _softmax_(wanted := self._logits("target", part.teacher))
        total = _softmax_(logits)
        cross_entropy = part.spread(total - chosen)
        weights = self.weighting(torch.exp(-cross_entropy), part.valid)
        scores = SlotScores(cross_entropy, weights, part.spread(best == targets))
        scale = weights.flatten()[part.at, None]
        if wanted is None:
            # d(w ce)/d(logits) = w (q - onehot)
            return scores, logits.mul_(scale).scatter_add_(1, targets, -scale) if sloped else logits
        apart = torch.sub(logits, wanted, out=wanted)
        distance = torch.linalg.vector_norm(apart, ord=1, dim=-1, keepdim=True)
        scores = scores._replace(distance=part.spread(distance))
        if sloped:
            # d(sum |q - p|)/d(logits) = q (s - sum q s), s = sign(q - p); here over q, in place
            hard, sign = scale * (1 - self.soft), apart.sign_()
            mean = torch.bmm(logits[:, None], sign[:, :, None])[:, 0]
            logits.mul_(sign.sub_(mean).mul_(scale * self.soft).add_(hard)).scatter_add_(1, targets, -hard)
        return scores, logits

    def _logits(self, whose: str, rows: Tensor) -> Tensor:
        logits = rows.to(self.head.dtype) @ self.head.t()
        return self._room(whose, logits).copy_(logits)

    def _room(self, name: str, like: Tensor) -> Tensor:
        # kept between steps: to take 20 MB from the system costs a CPU more than to fill them
        room = self.rooms.get(name)
        if room is None or len(room) < len(like):
            dtype = torch.promote_types(self.head.dtype, torch.float32)
            room = torch.empty(like.shape, dtype=dtype, device=like.device)
            self.rooms[name] = room
        return room[: len(like)]


def _put(whole: Tensor | None, blocks: slice, at: Tensor, rows: Tensor) -> None:
    if whole is not None:
        whole[blocks].flatten(0, 1).index_copy_(0, at, rows.to(whole.dtype))


def _softmax_(logits: Tensor) -> Tensor:
    """Replaces logits [rows, vocabulary] by their softmax; returns the logarithms of their sums, [rows, 1]."""
    highest = logits.amax(-1, keepdim=True)
    total = logits.sub_(highest).exp_().sum(-1, keepdim=True)
    logits.div_(total)
    return highest + total.log()


def _joined(chunks: list[SlotScores]) -> SlotScores:
    columns = zip(*chunks, strict=True)
    return SlotScores(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]


class _SlotLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, latent: Tensor | None, bias: Tensor | None, labels: Labels, loss: SlotLoss
    ) -> tuple[Tensor | None, ...]:
        scores, gradients = loss.scores_and_gradient(hidden, latent, bias, labels)
        total = scores.weights.sum().clamp(min=1e-9)  # no slot of the step may count
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
