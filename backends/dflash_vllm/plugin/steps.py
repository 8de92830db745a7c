"""Results of a step of vLLM's scheduler: requests that decoded, their widths, and the step's time. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any


class StepClock:
    """Seconds of a step: from the last result to this one, or from its scheduling after an idle time."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self._from: float | None = None

    def scheduled(self) -> None:
        """A step begins, unless one is under way."""
        if self._begun is None:
            self._begun = perf_counter()

    def answered(self) -> float | None:
        """Seconds of the step whose result has come; None if its start was not seen."""
        now = perf_counter()
        begun, self._begun = self._from or self._begun, None
        self._from = now
        return None if begun is None else now - begun

    def settled(self, *, busy: bool) -> None:
        """Call after the result has been processed; `busy`: requests are left."""
        if not busy:
            self._from = None


def decoding_steps(output: Any, accepted: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """(width, accepted drafted tokens) of each request that decoded in a step; prefilled requests are left out.

    Args:
        output: vLLM's `SchedulerOutput`.
        accepted: by request, for requests with verified drafts that had not ended.
    """
    steps = {}
    begun = {request.req_id for request in output.scheduled_new_reqs}
    for request_id, rows in output.num_scheduled_tokens.items():
        drafted = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        if rows == drafted + 1 and request_id not in begun and (not drafted or request_id in accepted):
            steps[request_id] = (rows, accepted.get(request_id, 0))
    return steps


def is_even(output: Any, steps: Mapping[str, tuple[int, int]]) -> bool:
    """True if the step only decoded and its drafts and verifications had one width: its time is that width's cost.

    A block is drafted in one step and verified in the next, so a step in which the width changes mixes two widths.
    """
    widths = {width for width, _ in steps.values()}
    return len(steps) == len(output.num_scheduled_tokens) and widths <= {output.num_spec_tokens_to_schedule + 1}


def steps_by_width(offered: Sequence[int]) -> dict[int, int]:
    """Number of steps by width, from the number of times each slot was verified: a step of width w has slots 1..w-1."""
    wider = [*offered[1:], 0]
    return {slot + 1: count - wider[slot - 1] for slot, count in enumerate(offered, 1) if count > wider[slot - 1]}
