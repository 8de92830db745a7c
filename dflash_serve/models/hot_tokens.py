"""Drafting from a list of frequent tokens: only their rows of the target's head are read.

The target verifies a draft by its whole head, so no answer changes; a token that training never showed the drafter is
little loss (FR-Spec, arXiv 2502.14856; SGLang's `--speculative-token-map` does this for EAGLE). The list is
`hot_tokens.json` in the drafter's folder; only the embedded engine reads it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from dflash_serve.checkpoint.config import DrafterConfig
from dflash_serve.common.files import write_whole
from dflash_serve.errors import UserError
from dflash_serve.models.layers import CompiledLinear, dense_weight, pack_linear, rounded

HOT_TOKENS = "hot_tokens.json"


def takes_hot_tokens(config: DrafterConfig) -> bool:
    """Each slot is one product with the target's head, independent of the other slots."""
    return config.markov is None and config.selector is None and config.draft_vocabulary is None


def read_hot_tokens(folder: Path, vocab_size: int) -> list[int] | None:
    """Target ids from a drafter's folder, rising; None if it has no list.

    Raises:
        UserError: the file holds no rising list of ids of the vocabulary.
    """
    path = folder / HOT_TOKENS
    if not path.exists():
        return None
    try:
        ids = TypeAdapter(list[int]).validate_json(path.read_bytes(), strict=True)
    except (OSError, ValidationError):
        ids = []
    if not ids or ids[0] < 0 or ids[-1] >= vocab_size or any(a >= b for a, b in pairwise(ids)):
        why = f"it holds no rising list of token ids below {vocab_size}"
        raise UserError(why, where=str(path), do="remove it: the drafter then drafts from the whole vocabulary")
    return ids


def write_hot_tokens(folder: Path, token_ids: Sequence[int]) -> None:
    """Writes the list completely or not at all."""
    write_whole(folder / HOT_TOKENS, json.dumps(list(token_ids)) + "\n")


class HotHead:
    """The rows of a target's head for a list of tokens.

    Args:
        head: of the target, packed or not.
        token_ids: target ids.
    """

    def __init__(self, head: nn.Module, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)
        rows = dense_weight(head)[torch.tensor(self.token_ids)]
        linear = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(rows, requires_grad=False)
        self.linear = rounded(pack_linear(linear, compiled=isinstance(head, CompiledLinear)))

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [rows, H] after the drafter's final norm -> logits [rows, tokens]."""
        out: Tensor = self.linear(hidden)
        return out

    def target_ids(self, drafts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Indices in the list -> target ids."""
        return [[self.token_ids[place] for place in draft] for draft in drafts]
