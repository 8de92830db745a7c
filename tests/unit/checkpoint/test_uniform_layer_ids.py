"""The uniform choice of target layers is z-lab's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_serve.checkpoint.config import uniform_target_layer_ids


@pytest.mark.parametrize(
    ("depth", "count", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (30, 5, (1, 8, 14, 20, 27)),
        (30, 3, (1, 14, 27)),
        (30, 6, (1, 6, 11, 17, 22, 27)),
        (36, 1, (18,)),
    ],
)
def test_known_choices(depth: int, count: int, ids: tuple[int, ...]) -> None:
    assert uniform_target_layer_ids(depth, count) == ids


@given(st.integers(4, 200), st.integers(1, 32))
@settings(deadline=None)  # the first example imports transformers
def test_it_is_zlabs_formula(depth: int, count: int) -> None:
    zlab = pytest.importorskip("dflash.model")
    assert list(uniform_target_layer_ids(depth, count)) == zlab.build_target_layer_ids(depth, count)


@pytest.mark.parametrize(("depth", "count"), [(3, 2), (0, 1), (36, 0)])
def test_an_impossible_choice_is_an_error(depth: int, count: int) -> None:
    with pytest.raises(ValueError, match=r"too shallow|cannot choose"):
        uniform_target_layer_ids(depth, count)
