"""What timed passes say about costs."""

from __future__ import annotations

import pytest

from dflash_torch.calibration import CONTEXT, tabulate


def test_what_the_contexts_cost_is_counted_once() -> None:
    entries, long = 4, 1024
    rows, drafts = [1, 2, 3, 4, 8, 16, 32], [1, 2, 4]
    seconds = {("target", n): 10 + n + 0.01 * CONTEXT * (1 if n <= 8 else entries) for n in rows}  # one block up to 8
    seconds |= {("draft", n): 2 + n + 0.02 * CONTEXT * n for n in drafts}
    seconds |= {("target_context", 1): 11 + 0.01 * long, ("draft_context", 1): 3 + 0.02 * long}
    cost = tabulate(seconds, entries, long)
    assert cost.target_context == pytest.approx(0.01)
    assert cost.draft_context == pytest.approx(0.02)
    assert [cost.target_seconds(n) for n in rows] == pytest.approx([10 + n for n in rows])
    assert cost.step_seconds([8, 8, 8, 8], 4 * 500) == pytest.approx(10 + 32 + 0.03 * 4 * 500 + 2 + 4)


def test_a_short_context_that_was_measured_slower_than_a_long_one_costs_nothing() -> None:
    cost = tabulate(
        {("target", 1): 2.0, ("draft", 1): 1.0, ("target_context", 1): 1.5, ("draft_context", 1): 0.9}, 1, 512
    )
    assert (cost.target_context, cost.draft_context) == (0.0, 0.0)
    assert cost.step_seconds([1], 512) == 2.0
