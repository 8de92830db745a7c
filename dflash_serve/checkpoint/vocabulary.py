"""Checks the maps of a reduced draft vocabulary: `d2t` (int64 [Vd], target id - draft id) and `t2d` (bool [V]).

Each fault here was met in the field and costs nearly all acceptance without an error. Needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from dflash_serve.errors import Problem

AGAIN = "download the drafter again, or export it again"


def map_problems(d2t: Tensor, vocab_size: int, where: Path) -> Iterator[Problem]:
    """Draft ids must stand for target ids in rising order."""
    ids = torch.arange(len(d2t)) + d2t
    if _rises_within(ids, vocab_size):
        return
    if _rises_within(d2t, vocab_size):
        what = "tensor d2t holds the target ids themselves, not how far each lies from its draft id"
        yield Problem(what, str(where), "subtract 0, 1, 2, ... from it")
        return
    bad = int(((ids < 0) | (ids >= vocab_size)).sum())
    fault = (
        f"sends {bad} draft ids outside the vocabulary of {vocab_size}" if bad else "does not rise with the draft id"
    )
    yield Problem(f"tensor d2t {fault}", str(where), AGAIN)


def _rises_within(ids: Tensor, vocab_size: int) -> bool:
    return bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size


def mask_problems(d2t: Tensor, t2d: Tensor, where: Path) -> Iterator[Problem]:
    """Both maps must name the same tokens."""
    ids = torch.arange(len(d2t)) + d2t
    marked = t2d.nonzero().flatten()
    if len(marked) != len(ids):
        yield Problem(f"tensor t2d marks {len(marked)} tokens but d2t maps {len(ids)}", str(where), AGAIN)
    elif not torch.equal(marked, ids):
        differing = int((marked != ids).sum())
        yield Problem(f"tensors t2d and d2t name different tokens ({differing} of {len(ids)})", str(where), AGAIN)


def target_mask(d2t: Tensor, vocab_size: int) -> Tensor:
    """`t2d` of a `d2t`."""
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[torch.arange(len(d2t)) + d2t] = True
    return mask
