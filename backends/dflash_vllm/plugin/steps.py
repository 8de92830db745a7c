"""What a step of vLLM's scheduler came to: which requests decoded, how wide, how long it took. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any


class StepClock:
    """Seconds of a step: from one answer to the next where steps follow one another, else from its scheduling."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self._from: float | None = None

    def scheduled(self) -> None:
        """A step begins, unless one is under way."""
        if self._begun is None:
            self._begun = perf_counter()

    def answered(self) -> float | None:
        """The step's result is there; None where its begin was not seen."""
        now = perf_counter()
        begun, self._begun = self._from or self._begun, None
        self._from = now
        return None if begun is None else now - begun

    def settled(self, *, busy: bool) -> None:
        """The result is worked in; `busy`: requests are left."""
        if not busy:
            self._from = None


def decoding_steps(output: Any, accepted: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Of the requests that decoded in a step: (width, drafted tokens accepted); those that were prefilled are left out.

    Args:
        output: vLLM's `SchedulerOutput`.
        accepted: by request, for those whose drafted tokens were put to the test and that had not ended.
    """
    steps = {}
    begun = {request.req_id for request in output.scheduled_new_reqs}
    for request_id, rows in output.num_scheduled_tokens.items():
        drafted = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        if rows == drafted + 1 and request_id not in begun and (not drafted or request_id in accepted):
            steps[request_id] = (rows, accepted.get(request_id, 0))
    return steps


def is_even(output: Any, steps: Mapping[str, tuple[int, int]]) -> bool:
    """Whether a step did nothing but decode, as wide as it drafted: what it took is the cost of that width.

    A block is drafted in one step and verified in the next, so where the width changes a step's time is of two.
    """
    widths = {width for width, _ in steps.values()}
    return len(steps) == len(output.num_scheduled_tokens) and widths <= {output.num_spec_tokens_to_schedule + 1}


def steps_by_width(offered: Sequence[int]) -> dict[int, int]:
    """Steps of each width, from how often each slot was offered: slot k is in every step wider than k."""
    wider = [*offered[1:], 0]
    return {slot + 1: count - wider[slot - 1] for slot, count in enumerate(offered, 1) if count > wider[slot - 1]}
