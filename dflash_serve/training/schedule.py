"""What a step trains on, and at which rate: functions of seed and step alone, so that a resumed run is the same run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def epoch_order(seed: int, epoch: int, count: int) -> Tensor:
    """A permutation of `count` sequences, int64 [count]."""
    return torch.randperm(count, generator=_generator(seed, epoch, 0))


def step_sequences(seed: int, step: int, count: int, per_step: int) -> list[tuple[int, int]]:
    """(epoch, index) of the sequences of a step; epochs follow one another without a gap."""
    epochs: dict[int, Sequence[int]] = {}
    chosen = []
    for place in range(step * per_step, (step + 1) * per_step):
        epoch, offset = divmod(place, count)
        if epoch not in epochs:
            epochs[epoch] = epoch_order(seed, epoch, count).tolist()
        chosen.append((epoch, epochs[epoch][offset]))
    return chosen


def draw_anchors(seed: int, epoch: int, index: int, *, first: int, length: int, count: int) -> Tensor:
    """Sorted anchors int64 [<= count] among the answer's positions first .. length-2, without repetition.

    The last position is none: nothing follows it. `first` is the answer's first token, which prefill has sampled but
    the target has not read: the same state as after every verification.
    """
    candidates = torch.arange(first, length - 1)
    chosen = torch.randperm(len(candidates), generator=_generator(seed, epoch, index + 1))[:count]
    return candidates[chosen].sort().values


def learning_rate(progress: float, *, peak: float, warmup: float, final: float) -> float:
    """Linear warm-up over the first `warmup` share of the budget, then a cosine down to `final` x peak."""
    if progress < warmup:
        # Never 0: the first step is part of the warm-up.
        return peak * max(progress, 1e-3) / warmup
    along = min(1.0, (progress - warmup) / max(1e-9, 1.0 - warmup))
    return peak * (final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * along)))


def _generator(seed: int, epoch: int, index: int) -> torch.Generator:
    """A generator of its own for every (seed, epoch, index): the order of the calls does not matter."""
    mixed = ((seed * 1_000_003 + epoch) * 1_000_003 + index) & 0x7FFF_FFFF_FFFF_FFFF
    return torch.Generator().manual_seed(mixed)
