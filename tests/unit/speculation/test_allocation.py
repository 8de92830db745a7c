"""Widths from survival and costs: the best of all, by trying all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_serve.speculation.allocation import choose_widths, widths_by_batch
from dflash_serve.speculation.costs import CostModel

MEDIUM = CostModel(target={1: 1.0, 2: 1.3, 8: 1.6, 64: 4.0, 256: 16.0}, draft={1: 0.3, 32: 0.6})

survivals = st.lists(
    st.lists(st.floats(0, 1), min_size=3, max_size=3).map(lambda h: list(itertools.accumulate(h, min))),
    min_size=1,
    max_size=3,
)
costs = st.builds(  # a draft costs the same however many are drafted: then the choice is the best of all
    CostModel,
    target=st.dictionaries(st.integers(1, 16), st.floats(0.1, 10), min_size=1, max_size=5),
    draft=st.floats(0.01, 5).map(lambda seconds: dict.fromkeys(range(1, 5), seconds)),
)


def rate(widths: Sequence[int], survival: Sequence[Sequence[float]], cost: CostModel) -> float:
    tokens = len(widths) + sum(sum(s[: width - 1]) for s, width in zip(survival, widths, strict=True))
    return tokens / cost.step_seconds(list(widths))


@settings(deadline=None)
@given(survivals, costs)
def test_no_other_widths_are_faster(survival: list[list[float]], cost: CostModel) -> None:
    chosen = choose_widths(survival, cost)
    best = max(rate(widths, survival, cost) for widths in itertools.product(range(1, 5), repeat=len(survival)))
    assert rate(chosen, survival, cost) >= best * (1 - 1e-9)


@settings(deadline=None)
@given(survivals, costs)
def test_no_allowed_shared_width_is_faster(survival: list[list[float]], cost: CostModel) -> None:
    chosen = choose_widths(survival, cost, allowed_widths=[2, 4])
    assert set(chosen) <= {1, 2, 4}
    assert len(set(chosen)) == 1
    best = max(rate([width] * len(survival), survival, cost) for width in (1, 2, 4))
    assert rate(chosen, survival, cost) >= best * (1 - 1e-9)


def test_the_likelier_request_gets_the_wider_block() -> None:
    likely, unlikely = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3], [0.2, 0.04, 0.0, 0.0, 0.0, 0.0, 0.0]
    wide, narrow = choose_widths([likely, unlikely], MEDIUM)
    assert wide > narrow


def test_a_long_context_makes_wider_blocks_worth_it() -> None:
    """Reading the K/V costs the same for any width, so the rows beside it cost less and less."""
    cost = CostModel(target={1: 1.0, 8: 3.0}, draft={1: 0.2}, target_context=1e-4)
    survival = [[0.5, 0.25, 0.12, 0.06, 0.03, 0.01, 0.01]]
    assert choose_widths(survival, cost)[0] < choose_widths(survival, cost, context_tokens=100_000)[0]


def test_where_every_row_pays_for_its_context_a_long_one_makes_blocks_narrower() -> None:
    cost = CostModel(target={1: 1.0, 32: 1.4}, draft={4: 0.2}, target_attention=1e-5)
    survival = [[0.5, 0.25, 0.12, 0.06, 0.03, 0.01, 0.01]] * 4
    short, long = (choose_widths(survival, cost, context_tokens=4 * each) for each in (100, 100_000))
    assert short[0] > long[0]
    assert cost.step_seconds([2] * 4, 400) - cost.step_seconds([2] * 4) == pytest.approx(8 * 100 * 1e-5)


def test_without_requests_there_are_no_widths() -> None:
    assert choose_widths([], MEDIUM) == choose_widths([], MEDIUM, allowed_widths=[2]) == []


@settings(deadline=None)
@given(survivals, costs)
def test_a_table_by_batch_size_has_what_would_be_chosen_at_each(survival: list[list[float]], cost: CostModel) -> None:
    slots = survival[0]
    table = widths_by_batch(slots, cost, (1, 2, 4), 6)
    assert [first for first, _, _ in table] == [1, *(last + 1 for _, last, _ in table[:-1])]
    assert table[-1][1] == 6
    for first, last, width in table:
        for batch in range(first, last + 1):
            chosen = choose_widths([slots] * batch, cost, allowed_widths=(1, 2, 4))
            assert rate([width] * batch, [slots] * batch, cost) >= rate(chosen, [slots] * batch, cost) * (1 - 1e-9)
