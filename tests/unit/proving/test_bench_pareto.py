"""The frontier, the ratio at one interactivity, and the sentence that says it."""

from __future__ import annotations

import pytest
from dflash_serve.client.acceptance_reading import AcceptanceReading
from hypothesis import given
from hypothesis import strategies as st

from dflash_serve.proving.bench.pareto import Spot, frontier, reach, throughput_at
from dflash_serve.proving.bench.results import Point
from dflash_serve.proving.bench.sentence import at_every_spot, curves, headline

OFF = [Spot(40, 40), Spot(30, 110), Spot(20, 150)]
AUTO = [Spot(80, 80), Spot(50, 190), Spot(25, 240)]

figures = st.floats(min_value=0.1, max_value=1e6)
spots = st.lists(st.builds(Spot, figures, figures), min_size=1, max_size=12)


def point(way: str, spot: Spot | None, concurrency: int = 1) -> Point:
    return Point(
        way=way,
        concurrency=concurrency,
        rounds=1,
        throughput_per_device=spot.throughput if spot else 1.0,
        lowest=1.0,
        highest=1.0,
        interactivity=spot.interactivity if spot else None,
        first_token_ms=None,
        first_token_p99_ms=None,
        inter_token_ms=None,
        requests=1,
        errors=0,
        acceptance=AcceptanceReading(),
    )


def points(**ways: list[Spot]) -> list[Point]:
    return [point(way, spot, users) for way, line in ways.items() for users, spot in enumerate(line, 1)]


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
    assert (reach(OFF), reach([])) == (40, None)


def test_the_sentence_is_the_ratio_at_the_most_that_both_reach() -> None:
    comparison, words = headline(points(off=OFF, auto=AUTO), baseline="off", way=None, interactivity=None, device="GPU")
    assert comparison is not None
    assert comparison.interactivity == 40
    assert comparison.throughput == pytest.approx(190 + (240 - 190) * 10 / 25)  # between 25 and 50 tokens/s/user
    assert comparison.ratio == pytest.approx(210 / 40)
    assert words == "At 40.0 tokens/s/user, “auto” serves 5.25 times the tokens/s/GPU of “off” (210.0 against 40.0)."


def test_a_chosen_interactivity_is_used() -> None:
    found, _ = headline(points(off=OFF, auto=AUTO), baseline="off", way=None, interactivity=20, device="GPU")
    assert found is not None
    assert found.ratio == pytest.approx(240 / 150)


def test_auto_is_what_is_compared_even_where_another_way_is_better() -> None:
    better = [Spot(x * 2, y * 2) for x, y in AUTO]
    found, _ = headline(
        points(off=OFF, auto=AUTO, fixed=better), baseline="off", way=None, interactivity=None, device="GPU"
    )
    assert found is not None
    assert found.way == "auto"


def test_without_auto_it_is_the_best_of_the_others() -> None:
    found, _ = headline(points(a=OFF, b=OFF, c=AUTO), baseline="a", way=None, interactivity=None, device="GPU")
    assert found is not None
    assert found.way == "c"


@pytest.mark.parametrize(
    ("at", "words"),
    [
        (60, "“off” does not reach 60.0 tokens/s/user; “auto” serves 153.3 tokens/s/GPU there."),
        (90, "Neither “auto” nor “off” reaches 90.0 tokens/s/user."),
    ],
)
def test_what_is_out_of_reach_is_said_not_guessed(at: float, words: str) -> None:
    found, said = headline(points(off=OFF, auto=AUTO), baseline="off", way=None, interactivity=at, device="GPU")
    assert found is not None
    assert (found.ratio, said) == (None, words)


def test_one_way_has_nothing_to_be_compared_with() -> None:
    assert headline(points(off=OFF), baseline="off", way=None, interactivity=None, device="GPU")[0] is None


def test_a_way_without_known_interactivity_is_no_curve() -> None:
    assert curves([point("off", None)]) == {"off": []}
    assert headline([point("off", None), point("auto", OFF[0])], baseline="off", way=None, interactivity=None,
                    device="GPU")[0] is None  # fmt: skip


def test_every_spot_of_the_baselines_frontier_is_a_row() -> None:
    rows = at_every_spot(curves(points(off=[*OFF, Spot(1, 1)], auto=AUTO)), "off")
    assert [[(each.way, each.interactivity) for each in row] for row in rows] == [
        [("auto", 20)],
        [("auto", 30)],
        [("auto", 40)],
    ]
