"""What the tensor-parallel ranks of a server decide together, so that no two of them ever do different things.

Everything here goes over the host (gloo), where a rank that does not come can be waited for with an end: SGLang's own
device collectives would wait for ever.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

PATIENCE = timedelta(minutes=5)
"""How long the others are waited for at start-up; beyond, this rank raises, and SGLang ends the server."""
T = TypeVar("T")


class Ranks:
    """The ranks of one tensor-parallel group; `group` is SGLang's."""

    def __init__(self, group: Any) -> None:
        self.group = group.cpu_group
        self.count = int(group.world_size)
        self.several = self.count > 1
        self.is_first = group.rank_in_group == 0

    def least(self, value: float) -> float:
        """The smallest of all ranks' values."""
        return self._reduced(torch.tensor([value], dtype=torch.float64), distributed.ReduceOp.MIN)[0].item()

    def all_agree(self, ok: bool) -> bool:
        """Whether every rank says yes.

        Raises:
            RuntimeError: a rank did not come (it failed where the others still wait for it).
        """
        if self.several:
            distributed.monitored_barrier(self.group, timeout=PATIENCE)
        return self.least(float(ok)) == 1.0

    def slowest(self, seconds: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks' values, one by one."""
        return self._reduced(seconds, distributed.ReduceOp.MAX)

    def from_first(self, value: T) -> T:
        """The first rank's value, anything that can be pickled: start-up only."""
        if not self.several:
            return value
        box = [value]
        distributed.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def number_from_first(self, value: int) -> int:
        """The first rank's number: once a step."""
        if not self.several:
            return value
        box = torch.tensor([value], dtype=torch.int64)
        distributed.broadcast(box, group=self.group, group_src=0)
        return int(box.item())

    def _reduced(self, values: torch.Tensor, how: Any) -> torch.Tensor:
        if self.several:
            distributed.all_reduce(values, op=how, group=self.group)
        return values
