"""The slots of a step: what the drafter with its heads predicts of them, and what the target wants there.

A walk from left to right needs no walk in training: each slot is told the right token before it ("teacher forcing"),
which is what it reads in decoding for as long as the slots before it are accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.target import TargetModel
from dflash_serve.training.blocks import BlockForward, Blocks

if TYPE_CHECKING:
    from dflash_serve.models.drafter_heads import MarkovHead


class Predictions(NamedTuple):
    """Of slots 1..B-1. Logits are hidden @ head.T, and with a Markov head + latent @ bias.T.

    Attributes:
        hidden: [blocks, B-1, H] after the final norm; latent: [blocks, B-1, r]; bias: [vocabulary, r].
        confidence: logits [blocks, B-1]; None = no such head.
    """

    hidden: Tensor
    latent: Tensor | None = None
    bias: Tensor | None = None
    confidence: Tensor | None = None


class Labels(NamedTuple):
    """Of slots 1..B-1: token ids int64 [blocks, B-1], which of them count, and where the target's distributions are
    wanted, its hidden states [blocks, B-1, H] after the final norm.
    """

    targets: Tensor
    valid: Tensor
    teacher: Tensor | None = None


class SlotForward:
    """A drafter over `Blocks`; arguments as for `BlockForward`. Heads compute in fp32: they are small."""

    def __init__(self, drafter: Drafter, embedding: Tensor, *, dtype: torch.dtype) -> None:
        self.drafter, self.backbone = drafter, BlockForward(drafter, embedding, dtype=dtype)

    def __call__(self, blocks: Blocks, features: Sequence[Tensor]) -> Predictions:
        hidden = self.backbone(blocks, features)
        markov, confidence = self.drafter.markov_head, self.drafter.confidence_head
        previous = torch.cat([blocks.anchor_ids[:, None], blocks.targets[:, :-1]], dim=1)
        found = Predictions(hidden)
        if markov is not None:
            found = found._replace(latent=_latents(markov, previous, hidden), bias=markov.markov_w2.weight)
        if confidence is not None:
            known = markov.markov_w1(previous) if markov is not None and confidence.with_markov else None
            found = found._replace(confidence=confidence(hidden.float(), known))
        return found


def _latents(markov: MarkovHead, previous: Tensor, hidden: Tensor) -> Tensor:
    """[blocks, B-1, r] of every slot after the tokens `previous` [blocks, B-1], from left to right."""
    latents, state = [], None
    for token, rows in zip(previous.unbind(1), hidden.unbind(1), strict=True):
        latent, state = markov.latent(token, rows.float(), state)
        latents.append(latent)
    return torch.stack(latents, dim=1)


class Teacher:
    """What is read of the target for a step, and made of it.

    Args:
        soft: the slots' labels are the target's distributions, too: its last layer's outputs are one feature more.
    """

    def __init__(self, target: TargetModel, config: DrafterConfig, *, soft: bool) -> None:
        self.target, self.soft, self.own = target, soft, config.feature_size
        self.layer_ids = config.target_layer_ids + ((target.config.num_layers - 1,) if soft else ())

    @torch.no_grad()
    def __call__(self, blocks: Blocks, features: Sequence[Tensor]) -> tuple[list[Tensor], Labels]:
        """The drafter's features of each sequence, and the labels.

        Args:
            features: [length, F*H] of each sequence, of `layer_ids`.
        """
        teacher = None
        if self.soft:
            ahead = torch.arange(blocks.targets.shape[1], device=blocks.anchors.device)
            pairs = zip(features, blocks.anchors.split(blocks.counts), strict=True)
            rows = [rows[(at[:, None] + ahead).clamp(max=len(rows) - 1), self.own :] for rows, at in pairs]
            teacher = self.target.norm(torch.cat(rows))
        return [rows[:, : self.own] for rows in features], Labels(blocks.targets, blocks.valid, teacher)
