"""Costs from timed passes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dflash_torch.calibration import CONTEXT, measure, tabulate
from dflash_torch.sampler import Sampler
from tests.support.embedded import tiny_engine


def test_what_the_host_does_for_a_step_is_a_part_of_it(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU most of a small model's step: without it, drafts looked three times as dear as they were."""
    speculator = tiny_engine(folders).scheduler.speculator
    assert speculator is not None
    sample = Sampler.__call__

    def slowly(*given: Any) -> Any:
        time.sleep(0.02)
        return sample(*given)

    monkeypatch.setattr(Sampler, "__call__", slowly)
    cost = measure(speculator.target, speculator.drafter, speculator.block_size, 2).cost
    assert all(0.02 < cost.target_seconds(rows) < 0.04 for rows in (1, 2, 8))
    assert cost.draft_seconds(1) < 0.02


def test_what_the_contexts_cost_is_counted_once() -> None:
    entries, long = 4, 1024
    rows, drafts = [1, 2, 3, 4, 8, 16, 32], [1, 2, 4]
    contexts = {n: 1 if n <= 8 else entries for n in rows}  # one block up to 8
    seconds = {("target", n): 10 + n + CONTEXT * (0.01 * contexts[n] + 0.005 * n) for n in rows}
    seconds |= {("draft", n): 2 + n + 0.02 * CONTEXT * n for n in drafts}
    seconds |= {("target_context", n): 10 + n + long * (0.01 + 0.005 * n) for n in (1, 8)}
    seconds |= {("draft_context", 1): 3 + 0.02 * long}
    cost = tabulate(seconds, entries, long)
    assert cost.target_context == pytest.approx(0.01)
    assert cost.target_attention == pytest.approx(0.005)
    assert cost.draft_context == pytest.approx(0.02)
    assert [cost.target_seconds(n) for n in rows] == pytest.approx([10 + n for n in rows])
    of_contexts = 500 * (0.03 * 4 + 0.005 * 32)
    assert cost.step_seconds([8, 8, 8, 8], 4 * 500) == pytest.approx(10 + 32 + of_contexts + 2 + 4)


def test_a_short_context_that_was_measured_slower_than_a_long_one_costs_nothing() -> None:
    seconds = {("target", 1): 2.0, ("target", 4): 3.0, ("draft", 1): 1.0}
    longer = {("target_context", 1): 1.5, ("target_context", 4): 2.9, ("draft_context", 1): 0.9}
    cost = tabulate(seconds | longer, 1, 512)
    assert (cost.target_context, cost.draft_context, cost.target_attention) == (0.0, 0.0, 0.0)
    assert cost.step_seconds([1], 512) == 2.0


def test_a_row_more_takes_no_more_of_the_context_than_a_whole_pass_of_one() -> None:
    seconds = {("target", 1): 2.0, ("target", 4): 3.0, ("draft", 1): 1.0, ("draft_context", 1): 1.0}
    cost = tabulate(seconds | {("target_context", 1): 2.1, ("target_context", 4): 9.0}, 1, CONTEXT + 100)
    assert cost.target_attention == pytest.approx(0.001)
    assert cost.target_context == pytest.approx(0.0)


def test_where_no_longer_context_fits_none_is_told_apart() -> None:
    cost = tabulate({("target", 1): 2.0, ("draft", 1): 1.0}, 1, CONTEXT)
    assert (cost.target_context, cost.draft_context, cost.target_attention) == (0.0, 0.0, 0.0)
