import json

import pytest

from dflash_serve.speculation.statistics import AcceptanceStatistics


def three_steps() -> AcceptanceStatistics:
    statistics = AcceptanceStatistics()
    statistics.record(4, 3)
    statistics.record(4, 1)
    statistics.record(2, 0)
    return statistics


def test_what_is_not_known_is_none_and_never_zero() -> None:
    nothing = AcceptanceStatistics()
    assert nothing.acceptance_length is None
    assert nothing.tokens_per_step is None
    assert nothing.survival(3) == [None, None]
    off = AcceptanceStatistics()
    off.record(1, 0)
    assert off.acceptance_length is None
    assert off.tokens_per_step == 1
    assert off.survival(2) == [None]


def test_figures_are_those_of_the_steps() -> None:
    statistics = three_steps()
    assert (statistics.steps, statistics.tokens) == (3, 7)
    assert statistics.acceptance_length == pytest.approx(7 / 3)
    assert statistics.acceptance_lengths == {1: 1, 2: 1, 4: 1}
    assert statistics.widths == {2: 1, 4: 2}


def test_survival_counts_only_steps_whose_width_covered_the_slot() -> None:
    assert three_steps().survival(5) == [pytest.approx(2 / 3), 0.5, 0.5, None]


def test_steps_without_speculation_do_not_dilute_the_acceptance_length() -> None:
    statistics = three_steps()
    statistics.record(1, 0, steps=3)
    assert statistics.acceptance_length == pytest.approx(7 / 3)
    assert statistics.tokens_per_step == pytest.approx(10 / 6)


def test_merging_is_counting_together() -> None:
    both = three_steps() + three_steps()
    assert both.steps == 6
    assert both.survival(4) == three_steps().survival(4)
    assert three_steps() + AcceptanceStatistics() == three_steps()


def test_json_brings_it_back() -> None:
    assert AcceptanceStatistics.from_dict(json.loads(json.dumps(three_steps().to_dict()))) == three_steps()


@pytest.mark.parametrize(("width", "accepted"), [(2, 2), (0, 0), (3, -1)])
def test_an_impossible_step_is_refused(width: int, accepted: int) -> None:
    with pytest.raises(ValueError, match="0 <= accepted < width"):
        AcceptanceStatistics().record(width, accepted)
