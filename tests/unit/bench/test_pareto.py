"""The frontier, the ratio at one interactivity, and the sentence that says it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_serve.bench.pareto import Spot, at_every_spot, cut, frontier, throughput_at

OFF = [Spot(40, 40), Spot(30, 110), Spot(20, 150)]
AUTO = [Spot(80, 80), Spot(50, 190), Spot(25, 240)]

figures = st.floats(min_value=0.1, max_value=1e6)
spots = st.lists(st.builds(Spot, figures, figures), min_size=1, max_size=12)


def test_a_spot_that_another_beats_in_both_is_not_on_the_frontier() -> None:
    assert frontier([*OFF, Spot(25, 90)]) == OFF[::-1]


@given(spots)
def test_nothing_beats_the_frontier(all_spots: list[Spot]) -> None:
    line = frontier(all_spots)
    assert [spot.interactivity for spot in line] == sorted({spot.interactivity for spot in line})
    assert [spot.throughput for spot in line] == sorted((spot.throughput for spot in line), reverse=True)
    for spot in all_spots:
        assert any(best.interactivity >= spot.interactivity and best.throughput >= spot.throughput for best in line)


@given(spots, figures)
def test_more_interactivity_never_gives_more_throughput(all_spots: list[Spot], at: float) -> None:
    here, further = throughput_at(all_spots, at), throughput_at(all_spots, at * 1.5)
    assert further is None or (here is not None and further <= here * (1 + 1e-9))


@given(spots)
def test_it_goes_through_the_spots_themselves(all_spots: list[Spot]) -> None:
    for spot in frontier(all_spots):
        assert throughput_at(all_spots, spot.interactivity) == pytest.approx(spot.throughput)


def test_between_spots_it_is_interpolated_on_a_straight_line() -> None:
    assert throughput_at(OFF, 35) == pytest.approx(75)


def test_slower_than_the_slowest_spot_is_as_good_as_that_spot() -> None:
    assert throughput_at(OFF, 5) == 150


def test_beyond_the_fastest_spot_nothing_is_known() -> None:
    assert throughput_at(OFF, 40.1) is None
    assert throughput_at([], 1) is None
    assert (throughput_at(OFF, 40), throughput_at(OFF[:1], 40)) == (40, 40)


def test_a_cut_says_both_throughputs() -> None:
    comparison = cut({"off": OFF, "auto": AUTO}, "off", 40)
    assert comparison is not None
    assert comparison.throughput == pytest.approx(190 + (240 - 190) * 10 / 25)  # between 25 and 50 tokens/s/user
    assert comparison.ratio == pytest.approx(210 / 40)
    assert comparison.sentence() == (
        "At 40.0 tokens/s/user, “auto” serves 5.25 times the tokens/s/device of “off” (210.0 against 40.0)."
    )


def test_a_chosen_interactivity_is_used() -> None:
    found = cut({"off": OFF, "auto": AUTO}, "off", 20)
    assert found is not None
    assert found.ratio == pytest.approx(240 / 150)


def test_auto_is_what_is_compared_even_where_another_variant_is_better() -> None:
    better = [Spot(x * 2, y * 2) for x, y, _ in AUTO]
    found = cut({"off": OFF, "auto": AUTO, "fixed": better}, "off", 40)
    assert found is not None
    assert found.variant == "auto"


def test_without_auto_it_is_the_best_of_the_others() -> None:
    found = cut({"a": OFF, "b": OFF, "c": AUTO}, "a", 40)
    assert found is not None
    assert found.variant == "c"


@pytest.mark.parametrize(
    ("at", "words"),
    [
        (60, "“off” does not reach 60.0 tokens/s/user; “auto” serves 153.3 tokens/s/device there."),
        (90, "Neither “auto” nor “off” reaches 90.0 tokens/s/user."),
    ],
)
def test_what_is_out_of_reach_is_said_not_guessed(at: float, words: str) -> None:
    found = cut({"off": OFF, "auto": AUTO}, "off", at)
    assert found is not None
    assert (found.ratio, found.sentence()) == (None, words)


def test_one_variant_has_nothing_to_be_compared_with() -> None:
    assert cut({"off": OFF}, "off", 40) is None


def test_a_variant_without_known_interactivity_is_no_curve() -> None:
    assert cut({"off": [], "auto": OFF[:1]}, "off", 40) is None
    assert cut({"off": OFF, "auto": []}, "off", 40) is None
    assert cut({"off": [], "auto": OFF}, "off", 20) is None


def test_every_spot_of_the_baselines_frontier_is_a_row() -> None:
    rows = at_every_spot({"off": [*OFF, Spot(1, 1)], "auto": AUTO}, "off")
    assert [[(each.variant, each.interactivity) for each in row] for row in rows] == [
        [("auto", 20)],
        [("auto", 30)],
        [("auto", 40)],
    ]
