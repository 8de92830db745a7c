from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_serve import SamplingParams
from dflash_torch.request import common_length
from tests.support.embedded import tiny_engine

Folders = tuple[Path, Path]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PREFIX = list(range(10, 50))


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_common_length_is_the_longest_common_prefix(a: list[int], b: list[int]) -> None:
    length = common_length(a, b)
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("steps", [0, 1, 3, 30])
def test_a_shared_prefix_is_not_computed_again_and_changes_nothing(folders: Folders, width: int, steps: int) -> None:
    """The donor is seen before, just after its prompt, while drafting, and after its end."""
    prompt = [*PREFIX, 60, 61]
    alone = tiny_engine(folders, width=width, reuse_prefixes=False).scheduler
    expected = alone.join(prompt, GREEDY)
    while alone.running:
        alone.step()
    scheduler = tiny_engine(folders, width=width).scheduler
    scheduler.join([*PREFIX, 50], GREEDY)
    for _ in range(steps):
        if scheduler.running:
            scheduler.step()
    request = scheduler.join(prompt, GREEDY)
    assert request.reused == (0 if steps == 0 else len(PREFIX))
    while scheduler.running:
        scheduler.step()
    assert request.token_ids == expected.token_ids


def test_the_drafter_sees_the_same_context_after_reuse(folders: Folders) -> None:
    """The context K/V is compared, since a fault in it would only lower acceptance."""
    fresh = tiny_engine(folders, reuse_prefixes=False).scheduler
    reused = tiny_engine(folders).scheduler
    reused.join([*PREFIX, 50], GREEDY)
    reused.step()
    a, b = fresh.join([*PREFIX, 60], GREEDY), reused.join([*PREFIX, 60], GREEDY)
    assert b.reused == len(PREFIX)
    for scheduler in (fresh, reused):
        for _ in range(3):
            scheduler.step()
    assert fresh.speculator is not None
    assert reused.speculator is not None
    length = min(a.injected, b.injected)
    assert length > len(PREFIX)
    keys, other = (
        fresh.speculator.cache.keys[:, a.entry, :, :length],
        reused.speculator.cache.keys[:, b.entry, :, :length],
    )
    assert (keys - other).abs().max() < 1e-5


def test_the_next_turn_of_a_conversation_goes_on_in_its_own_slot(folders: Folders) -> None:
    scheduler = tiny_engine(folders).scheduler
    first = scheduler.join(PREFIX, GREEDY)
    while scheduler.running:
        scheduler.step()
    turn = scheduler.join([*first.token_ids, 70, 71], GREEDY)
    assert turn.entry == first.entry
    assert turn.reused >= len(first.token_ids) - 2
    again = scheduler.join(PREFIX, GREEDY)  # all seen before: its last token is computed all the same
    assert again.reused == len(PREFIX) - 1
    assert scheduler.step()[1].token_ids


def test_prefixes_are_not_shared_across_salts_nor_from_a_failed_step(folders: Folders) -> None:
    scheduler = tiny_engine(folders).scheduler
    first = scheduler.join(PREFIX, GREEDY, salt="a")
    scheduler.step()
    assert scheduler.join(PREFIX, GREEDY, salt="b").reused == 0
    scheduler.leave(first, sound=False)
    assert scheduler.join(PREFIX, GREEDY, salt="a").reused == 0
