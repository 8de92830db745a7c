"""The frontier, what is compared on it, and the sentence that says it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_serve.bench.results import Point, compare, frontier, throughput_at
from dflash_serve.speculation.statistics import AcceptanceStatistics

NONE = AcceptanceStatistics.unknown()


def point(interactivity: float, throughput: float) -> Point:
    figures = {"throughput_per_device": throughput, "lowest": throughput, "highest": throughput}
    unknown = dict.fromkeys(("first_token_ms", "first_token_p99_ms", "inter_token_ms"))
    counts = {"concurrency": 1, "rounds": 1, "requests": 1, "errors": 0}
    return Point.model_validate(
        {"variant": "x", "interactivity": interactivity, **figures, **unknown, **counts, "acceptance": NONE}
    )


OFF = [point(40, 40), point(30, 110), point(20, 150)]
AUTO = [point(80, 80), point(50, 190), point(25, 240)]

figures = st.floats(min_value=0.1, max_value=1e6)
points = st.lists(st.builds(point, figures, figures), min_size=1, max_size=12)


@given(points)
def test_nothing_beats_the_frontier_and_the_curve_goes_through_it(all_points: list[Point]) -> None:
    line = frontier(all_points)
    places = [(each.interactivity or 0, each.throughput_per_device) for each in line]
    assert [x for x, _ in places] == sorted({x for x, _ in places})
    assert [y for _, y in places] == sorted((y for _, y in places), reverse=True)
    for each in all_points:
        assert any(x >= (each.interactivity or 0) and y >= each.throughput_per_device for x, y in places)
    for x, y in places:
        assert throughput_at(all_points, x) == pytest.approx(y)


@given(points, figures)
def test_more_interactivity_never_gives_more_throughput(all_points: list[Point], at: float) -> None:
    here, further = throughput_at(all_points, at), throughput_at(all_points, at * 1.5)
    assert further is None or (here is not None and further <= here * (1 + 1e-9))


@pytest.mark.parametrize(
    ("at", "throughput"),
    [(35, 75), (5, 150), (40, 40), (40.1, None)],
    ids=["between: a straight line", "below the slowest: that one's", "the fastest", "beyond it: not known"],
)
def test_throughput_between_and_beside_the_points(at: float, throughput: float | None) -> None:
    assert throughput_at(OFF, at) == (None if throughput is None else pytest.approx(throughput))
    assert throughput_at([], at) is None


@pytest.mark.parametrize(
    ("at", "ratio", "words"),
    [
        (40, 5.25, "“auto” serves 5.25 times the tokens/s/device of “off” (210.0 against 40.0)."),
        (20, 1.6, "“auto” serves 1.60 times the tokens/s/device of “off” (240.0 against 150.0)."),
        (60, None, "“off” does not reach 60.0 tokens/s/user; “auto” serves 153.3 tokens/s/device there."),
        (90, None, "Neither “auto” nor “off” reaches 90.0 tokens/s/user."),
    ],
)
def test_a_comparison_says_both_throughputs_or_what_is_out_of_reach(at: float, ratio: float | None, words: str) -> None:
    found = compare({"off": OFF, "auto": AUTO}, "auto", "off", at)
    assert found.ratio == (None if ratio is None else pytest.approx(ratio))
    assert found.sentence().endswith(words)
