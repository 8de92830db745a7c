"""Decisions that the tensor-parallel ranks of a server take together, so that all of them do the same.

All of them are exchanged on the host (gloo), with a time limit. SGLang's own device collectives have none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from dflash_serve.errors import first_line

logger = logging.getLogger(__name__)
PATIENCE = timedelta(minutes=5)
"""Time limit for other ranks at start-up. After it this rank raises, and SGLang ends the server."""
T = TypeVar("T")


class RankError(Exception):
    """Something failed on this rank or on another one; all ranks raise it."""


class Ranks:
    """The ranks of one tensor-parallel group; `group` is SGLang's."""

    def __init__(self, group: Any) -> None:
        self.group = group.cpu_group
        self.several = int(group.world_size) > 1
        self.is_first = group.rank_in_group == 0

    def least(self, *values: float, what: str = "a number of all ranks") -> list[float]:
        """The smallest of all ranks' values, one by one: start-up only.

        Args:
            what: the matter, for the error.

        Raises:
            RuntimeError: a rank did not come in time: it failed, or hangs, where the others still wait for it.
        """
        box = torch.tensor(values, dtype=torch.float64)
        if self.several:
            self._meet(what)
            distributed.all_reduce(box, op=distributed.ReduceOp.MIN, group=self.group)
        least: list[float] = box.tolist()
        return least

    def together(self, what: str, make: Callable[[], T]) -> T:
        """Gives what `make` gives on this rank, if no rank's `make` failed.

        Raises:
            RankError: it failed on one.
            RuntimeError: a rank did not come in time.
        """
        made, error = None, None
        try:
            made = make()
        except Exception as failure:
            error = failure
            logger.exception("dflash-serve: %s", what)
        if self.least(float(error is None), what=what) == [0]:
            raise RankError(f"{what}: {error or 'another rank failed'}") from error
        return made  # type: ignore[return-value]

    def _meet(self, what: str) -> None:
        # gloo's other exchanges wait as long as SGLang's group does, by default half an hour
        try:
            distributed.monitored_barrier(self.group, timeout=PATIENCE)
        except RuntimeError as error:
            text = f"dflash-serve: {what}: another rank did not come within {PATIENCE.total_seconds():g} s; "
            raise RuntimeError(f"{text}its log says where it failed or hangs ({first_line(error)})") from error

    def from_first(self, what: str, make: Callable[[], T]) -> T:
        """Gives what `make` gives on the first rank, anything that can be pickled: start-up only.

        Raises:
            RankError: it failed there.
        """
        value = self.together(what, lambda: make() if self.is_first else None)
        if self.several:
            box = [value]
            distributed.broadcast_object_list(box, group=self.group, group_src=0)
            value = box[0]
        return value  # type: ignore[return-value]

    def number_from_first(self, value: int) -> int:
        """The first rank's number: once a step."""
        if not self.several:
            return value
        box = torch.tensor([value], dtype=torch.int64)
        distributed.broadcast(box, group=self.group, group_src=0)
        return int(box.item())
