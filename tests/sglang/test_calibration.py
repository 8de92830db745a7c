"""What measured steps say about costs: a draft is what a step with one takes beyond the same rows without."""

from __future__ import annotations

import pytest


def test_steps_become_costs_of_rows_of_drafts_and_of_context() -> None:
    from dflash_sglang.plugin.startup import tabulate

    def taken(requests: int, width: int, context: int) -> float:
        """A row takes 1, a draft 5 and 2 for each request, a token of context 0.01, and 0.02 to draft."""
        draft = (5 + 2 * requests + 0.02 * context * requests) if width > 1 else 0.0
        return 10 + requests * width + 0.01 * context * requests + draft

    jobs = [(n, w, 100) for n in (1, 2, 4, 8, 16) for w in (1, 2, 4, 8)] + [(1, 1, 1000), (1, 8, 1000)]
    cost = tabulate({job: taken(*job) for job in jobs})
    assert cost.target_context == pytest.approx(0.01)
    assert cost.draft_context == pytest.approx(0.02)
    for requests, width, context in jobs:
        thought = cost.step_seconds([width] * requests, context * requests)
        assert thought == pytest.approx(taken(requests, width, context), rel=0.1)


def test_a_machine_that_is_slow_with_wide_blocks_alone_is_known_as_such() -> None:
    """Rows that one width has graphs for and another has not: both are measured, at every number of requests."""
    from dflash_sglang.plugin.startup import tabulate

    jobs = {(n, w, 128): (1.0 if w == 1 else 3.0) for n in (1, 2, 4, 8) for w in (1, 4)}
    cost = tabulate(jobs)
    assert cost.step_seconds([1] * 4) == pytest.approx(1.0)
    assert cost.step_seconds([4] * 2) == pytest.approx(3.0)


def test_drafts_for_more_requests_are_never_cheaper() -> None:
    """Steps without a draft that were timed beside other work would otherwise make the drafts beside them free."""
    from dflash_sglang.plugin.startup import tabulate

    jobs = {(n, w, 128): 10.0 + n * w + 5 * (w > 1) for n in (1, 2, 4, 8) for w in (1, 2, 4, 8)}
    jobs[4, 1, 128] = 30.0
    draft = tabulate(jobs).draft
    assert draft[1] == pytest.approx(5)
    assert draft[1] <= draft[2] <= draft[4] <= draft[8]
