"""The slots' weighted loss through the target's frozen head, in bounded memory.

The loss of a slot is the cross-entropy of the answer's token, mixed by the share `soft` with the soft loss: sum |q - p|
over the vocabulary, twice the total variation between the drafter's distribution q and the target's p (as in DSpark).
The gradient is made in the forward pass, chunk by chunk: the logits of a step (thousands of rows x the vocabulary)
never exist at once, and nothing is computed twice. On a GPU a chunk is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_serve.training.blocks import Compiled, Labels, Predictions
from dflash_serve.training.parallel import ALONE, Processes

BLOCKS_AT_ONCE = 32
LOGITS_ON_GPU = 2**28
"""Logits that exist together on a GPU, where few large products are faster: 1 GiB in fp32."""


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


def confidence_loss(confidence: Tensor, scores: SlotScores, processes: Processes = ALONE) -> Tensor:
    """Binary cross-entropy of the confidence head's logits [blocks, B-1], weighted as the slots.

    Args:
        processes: the weights of all of them divide the sum; their losses add up to that of the whole step.
    """
    weights = scores.weights
    loss = F.binary_cross_entropy_with_logits(confidence, scores.acceptance, weight=weights, reduction="sum")
    return loss / processes.total(weights.sum()).clamp(min=1e-9)


class SlotLoss:
    """The loss of a step through a frozen head, and its scores.

    Args:
        head: [vocabulary, H]; bf16 makes the products fast.
        soft: share of the soft loss in the loss, the rest is cross-entropy; its labels must have a teacher.
        kept: token ids int64 that the softmax runs over; None = all.
        blocks_at_once: blocks whose logits exist together; None = 32 on a CPU, and as many as fit `LOGITS_ON_GPU` else.
        processes: the weights of all of them divide the sum; their losses add up to that of the whole step.
    """

    def __init__(
        self,
        head: Tensor,
        weighting: Weighting,
        *,
        soft: float = 0.0,
        kept: Tensor | None = None,
        blocks_at_once: int | None = None,
        processes: Processes = ALONE,
    ) -> None:
        self.weighting, self.soft, self.kept, self.blocks_at_once = weighting, soft, kept, blocks_at_once
        self.processes = processes
        self.head = head if kept is None else head[kept].contiguous()
        self.places: Tensor | None = None  # each token's row of the head, where some are left out; 0 also for these
        self.known = torch.ones(len(head), dtype=torch.bool)  # on the CPU
        if kept is not None:
            self.places = torch.zeros(len(head), dtype=torch.int64, device=head.device)
            self.places[kept.to(head.device)] = torch.arange(len(kept), device=head.device)
            self.known = torch.zeros_like(self.known).index_fill(0, kept.cpu(), True)
        self.compiled = Compiled(self.measure, wanted=head.is_cuda)

    def __call__(self, predictions: Predictions, labels: Labels) -> tuple[Tensor, SlotScores]:
        """The weighted mean of the slots' losses, a scalar, differentiable in hidden, latent and bias; and the scores.

        The confidence head has a loss of its own (`confidence_loss`).
        """
        hidden, latent, bias = predictions.hidden, predictions.latent, self._kept_rows(predictions.bias)
        found, values, whole_bias = list[SlotScores](), list[Tensor](), _leaf(bias)
        slopes: tuple[list[Tensor], list[Tensor]] = [], []
        for own, at, part in self.parts(labels):
            leaves = _leaf(hidden[own]), _leaf(_rows(latent, own))
            value, scores = self.descend(*leaves, whole_bias, at, part)
            found.append(scores)
            values.append(value)
            for slope, leaf in zip(slopes, leaves, strict=True):
                slope += [] if leaf is None or leaf.grad is None else [leaf.grad]
        scores, loss = joined(found), torch.stack(values).sum()
        total = self.processes.total(scores.weights.sum()).clamp(min=1e-9)  # no slot of the step may count
        of_bias = [] if whole_bias is None or whole_bias.grad is None else [whole_bias.grad]
        # The gradient of sum(x * slope) in x is the slope; its own value is taken away again.
        for x, slope in zip((hidden, latent, bias), (*slopes, of_bias), strict=True):
            if x is not None and slope:
                known = (x * torch.cat(slope)).sum(dtype=loss.dtype)
                loss = loss + (known - known.detach())
        return loss / total, scores

    def knows(self, targets: Tensor) -> Tensor:
        """True for tokens, on the CPU, that the softmax runs over; slots of other tokens must not be valid."""
        return self.known[targets]

    @torch.no_grad()
    def scores(self, predictions: Predictions, labels: Labels) -> SlotScores:
        """The scores alone."""
        (hidden, latent, *_), bias = predictions, self._kept_rows(predictions.bias)
        parts = self.parts(labels)
        return joined([self.compiled(hidden[own], _rows(latent, own), bias, at, part)[1] for own, at, part in parts])

    def _kept_rows(self, bias: Tensor | None) -> Tensor | None:
        return bias if bias is None or self.kept is None else bias[self.kept]

    def parts(self, labels: Labels) -> Iterator[tuple[slice, Tensor, Labels]]:
        """The blocks of a step, `blocks_at_once` at a time; `at` and labels as of `measure`."""
        (count, slots), device = labels.valid.shape, self.head.device
        targets = labels.targets if self.places is None else self.places[labels.targets]
        at_once = self.blocks_at_once or BLOCKS_AT_ONCE
        if self.blocks_at_once is None and self.head.device.type != "cpu":
            at_once = max(at_once, LOGITS_ON_GPU // (slots * len(self.head)))
        for first in range(0, count, at_once):
            own = slice(first, first + at_once)
            valid = labels.valid[own]
            at = valid.flatten().nonzero()[:, 0]  # slots that do not count cost nothing
            yield own, at.to(device), Labels(targets[own], valid.to(device), _rows(labels.teacher, own))

    def measure(
        self, hidden: Tensor, latent: Tensor | None, bias: Tensor | None, at: Tensor, labels: Labels
    ) -> tuple[Tensor, SlotScores]:
        """The weighted sum of the losses of some blocks, and their scores. Everything is on the head's device.

        Args:
            hidden, latent: as in `Predictions`; bias: of the rows of the head that are kept.
            at: int64, places of the slots that count among all slots.
            labels: their targets are rows of the head.
        """

        def logits_of(rows: Tensor) -> Tensor:
            logits = rows.flatten(0, 1)[at].to(self.head.dtype) @ self.head.t()
            return logits.to(torch.promote_types(logits.dtype, torch.float32))

        def spread(each: Tensor) -> Tensor:  # of the slots that count -> of all, zero elsewhere
            return each.new_zeros(labels.valid.numel()).index_copy(0, at, each).view_as(labels.valid)

        targets, logits = labels.targets.flatten()[at], logits_of(hidden)
        if latent is not None and bias is not None:
            logits = logits + latent.flatten(0, 1)[at].to(self.head.dtype) @ bias.t().to(self.head.dtype)
        loss = cross_entropy = F.cross_entropy(logits, targets, reduction="none")
        hit, distance = logits.argmax(-1) == targets, None
        if self.soft:
            assert labels.teacher is not None
            distance = (logits.softmax(-1) - logits_of(labels.teacher).softmax(-1)).abs().sum(-1)
            loss = (1 - self.soft) * cross_entropy + self.soft * distance
        each = spread(cross_entropy.detach())
        weights = self.weighting(torch.exp(-each), labels.valid)
        scores = SlotScores(each, weights, spread(hit), None if distance is None else spread(distance.detach()))
        return (loss * weights.flatten()[at]).sum(), scores

    def descend(self, *inputs: Any) -> tuple[Tensor, SlotScores]:
        """As `measure`; the gradients of the sum go into those inputs that want one."""

        def both(measure: Callable[..., tuple[Tensor, SlotScores]]) -> tuple[Tensor, SlotScores]:
            with torch.enable_grad():
                value, scores = measure(*inputs)
            value.backward()
            return value.detach(), scores

        return self.compiled.run(both)


def _leaf(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)


def _rows(tensor: Tensor | None, own: slice) -> Tensor | None:
    return None if tensor is None else tensor[own]


def joined(chunks: list[SlotScores]) -> SlotScores:
    """The scores of several groups of blocks, one after the other."""
    columns = zip(*chunks, strict=True)
    return SlotScores(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]
