"""Scores a drafter on held-out answers, every position an anchor, over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.training.blocks import lay_out
from dflash_serve.training.forward import BlockForward
from dflash_serve.training.loss import SlotLoss
from dflash_serve.training.shards import Answer
from dflash_serve.training.target import Target, target_features
from dflash_serve.training.validation import Scores, Tally

ANSWERS_AT_ONCE = 4


class Validator:
    """`loss` runs over the target's whole head: what a reduced vocabulary gains in training must not flatter here."""

    def __init__(self, target: Target, forward: BlockForward, loss: SlotLoss, config: DrafterConfig) -> None:
        self.target, self.forward, self.loss, self.config = target, forward, loss, config

    @torch.no_grad()
    def scores(self, answers: Sequence[Answer]) -> Scores:
        """Means over all answers."""
        tally, device = Tally(self.config.block_size), self.target.embedding.device
        for first in range(0, len(answers), ANSWERS_AT_ONCE):
            part = answers[first : first + ANSWERS_AT_ONCE]
            sequences = [answer.tokens.to(device, torch.int64) for answer in part]
            anchors = [torch.arange(a.prompt_length, len(a.tokens) - 1, device=device) for a in part]
            blocks = lay_out(sequences, anchors, self.config.block_size)
            hidden = self.forward(blocks, target_features(self.target, sequences, self.config.target_layer_ids))
            scores = self.loss.scores(hidden, blocks.targets, blocks.valid)
            tally.add(blocks, scores.cross_entropy, scores.weights, scores.hit)
        return tally.scores()
