"""How good the drafter is on answers it has not seen: loss, accuracy per slot, acceptance lengths without a real loop.

Every position of an answer is an anchor once. `simulated_tau` is the mean acceptance length over all of them;
`replayed_tau` walks from an answer's first token as decoding does, from one anchor to the next not yet accepted, and is
what a lossless loop would have measured on these answers but for their last block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.training.blocks import Blocks, lay_out
from dflash_serve.training.dataset import Example, target_features
from dflash_serve.training.loss import SlotLoss, SlotScores, confidence_loss
from dflash_serve.training.slots import SlotForward, Teacher

ANSWERS_AT_ONCE = 4


@dataclass(frozen=True)
class Scores:
    """Means over a validation set. `survival`: share of replayed steps in which slot k (from 1) was accepted.

    `loss` is the weighted cross-entropy; `confidence_loss` None where there is no such head.
    """

    loss: float
    slot_accuracy: tuple[float, ...]
    simulated_tau: float
    replayed_tau: float
    survival: tuple[float, ...]
    confidence_loss: float | None = None

    def as_json(self) -> dict[str, float | list[float]]:
        """Rounded, for logs; what there is not is left out."""
        raw = {key: value for key, value in asdict(self).items() if value is not None and value == value}  # no NaN
        return {key: [round(x, 4) for x in v] if isinstance(v, tuple) else round(v, 4) for key, v in raw.items()}


class Tally:
    """Adds up slots over validation batches; all anchors of a sequence must come in one batch."""

    def __init__(self, block_size: int) -> None:
        self.hits = torch.zeros(block_size - 1)
        self.slots = torch.zeros(block_size - 1)
        self.loss = torch.zeros(3)
        """Of the slots and of their confidence, and the weights."""
        self.confident = False
        self.lengths: list[Tensor] = []
        self.walked: list[int] = []

    def add(self, blocks: Blocks, scores: SlotScores, confidence: Tensor | None = None) -> None:
        """Takes one batch; `confidence` as in `Predictions`."""
        valid, hit, weights = blocks.valid, scores.hit, scores.weights
        self.hits += (hit & valid).sum(0).cpu()
        self.slots += valid.sum(0).cpu()
        total, self.confident = weights.sum(), confidence is not None
        of_confidence = torch.zeros(()) if confidence is None else confidence_loss(confidence, scores) * total
        self.loss += torch.stack([(scores.cross_entropy * weights).sum(), of_confidence.to(total), total]).cpu()
        accepted = (hit & valid).long().cumprod(1).sum(1)
        whole = valid.all(1)
        self.lengths.append((accepted[whole] + 1).cpu())
        for sequence, fits in zip(accepted.split(blocks.counts), whole.split(blocks.counts), strict=True):
            self.walked += walk(sequence.tolist(), fits.tolist())

    def scores(self) -> Scores:
        """Means so far."""
        lengths = torch.cat(self.lengths).float()
        walked = torch.tensor(self.walked)
        steps = max(1, len(walked))
        slots, confidence = (self.loss[:2] / self.loss[2].clamp(min=1e-9)).tolist()
        return Scores(
            loss=slots,
            slot_accuracy=tuple((self.hits / self.slots.clamp(min=1)).tolist()),
            simulated_tau=float(lengths.mean()) if len(lengths) else float("nan"),
            replayed_tau=float(walked.float().mean()) if len(walked) else float("nan"),
            survival=tuple(float((walked > slot).sum()) / steps for slot in range(1, len(self.hits) + 1)),
            confidence_loss=confidence if self.confident else None,
        )


def walk(accepted: Sequence[int], fits: Sequence[bool]) -> list[int]:
    """Acceptance lengths (bonus token counted) of a decode that starts at the first anchor.

    Args:
        accepted: slots that would be accepted from each consecutive anchor.
        fits: whether the anchor's block lies wholly within the answer; the walk ends where it does not.
    """
    lengths, place = [], 0
    while place < len(accepted) and fits[place]:
        lengths.append(accepted[place] + 1)
        place += lengths[-1]
    return lengths


@torch.no_grad()
def held_out_scores(
    answers: Sequence[Example], teacher: Teacher, config: DrafterConfig, forward: SlotForward, loss: SlotLoss
) -> Scores:
    """Scores of the drafter that `forward` runs, every position of every answer an anchor.

    Args:
        loss: over the target's whole head: what a reduced vocabulary gains in training must not flatter here.
    """
    tally, target = Tally(config.block_size), teacher.target
    device = target.embedding.device
    for first in range(0, len(answers), ANSWERS_AT_ONCE):
        part = answers[first : first + ANSWERS_AT_ONCE]
        sequences = [answer.tokens.to(device, torch.int64) for answer in part]
        anchors = [torch.arange(a.prompt_length, len(a.tokens) - 1, device=device) for a in part]
        blocks = lay_out(sequences, anchors, config.block_size, config.rows())
        features, labels = teacher(blocks, target_features(target, sequences, teacher.layer_ids))
        predictions = forward(blocks, features)
        tally.add(blocks, loss.scores(predictions, labels), predictions.confidence)
    return tally.scores()
