"""Acceptance of one answer, in the shape vLLM's `metrics.speculative_decoding` has."""

from __future__ import annotations

from ..request import Request
from .responses import SpeculativeDecoding


def acceptance_of(request: Request, block_size: int, *, detailed: bool) -> SpeculativeDecoding:
    """Over the steps that verified a drafted token; `detailed` adds them one by one."""
    steps = [(width - 1, accepted) for width, accepted in request.steps if width > 1]
    drafted, accepted = sum(d for d, _ in steps), sum(a for _, a in steps)
    histogram = [0] * block_size
    for _, count in steps:
        histogram[count] += 1
    return SpeculativeDecoding(
        num_spec_tokens=block_size - 1,
        num_spec_steps=len(steps),
        num_draft_tokens=drafted,
        num_accepted_draft_tokens=accepted,
        mean_acceptance_length=1 + accepted / len(steps) if steps else None,
        draft_acceptance_rate=accepted / drafted if drafted else None,
        acceptance_histogram=histogram,
        per_step_accepted=[a for _, a in steps] if detailed else None,
        per_step_drafted=[d for d, _ in steps] if detailed else None,
    )
