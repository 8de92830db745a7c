"""What the width policy has decided: widths that stand for some steps of the same requests, or of most of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

MOST: Final = 3 / 4
"""Of the requests: so many must be the same for a decision not to draft to stand."""


@dataclass
class Decision:
    """Widths that stand for some steps of the same requests."""

    request_ids: list[Hashable]
    widths: list[int]
    left: int
    """Steps that it stands for yet."""
    drafts: bool = False
    is_trial: bool = False
    """A draft only to find out."""
    cost: float = 1.0
    """What such a step takes, in steps without speculation."""
    price: float = 0.0
    """What it loses beside the best one, in the same, to learn of wider blocks."""

    def holds_for(self, request_ids: list[Hashable]) -> bool:
        """Whether it is one for these requests, too: not to draft is, where most of them are the same."""
        if self.request_ids == request_ids:
            return self.left > 0
        if self.drafts or not self.left:
            return False
        same = len(set(self.request_ids) & set(request_ids))
        return same >= MOST * max(len(self.request_ids), len(request_ids))
