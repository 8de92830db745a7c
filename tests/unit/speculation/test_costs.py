"""Costs: tables as they were measured, and how served steps put them right."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from dflash_serve.speculation.costs import NO_CONTEXT, NODES, CostModel, LearntCosts, time_in_turns
from dflash_serve.speculation.width import SURPRISE, TimeEstimate

MEASURED = CostModel(target={1: 1.0, 2: 1.3, 8: 1.6, 64: 4.0, 256: 16.0}, draft={1: 0.3, 32: 0.6})


def seconds(costs: TimeEstimate, rows: int, drafted: int) -> float:
    return float(costs.of_steps(np.array([rows]), np.array([drafted]))[0])


def serve(costs: TimeEstimate, rows: int, drafted: int, factor: float, steps: int, seed: int = 0) -> None:
    """Steps that take `factor` times what was measured, give or take 5 %."""
    noise = np.random.default_rng(seed)
    for _ in range(steps):
        taken = _measured(rows, drafted) * factor * float(np.exp(0.05 * noise.normal()))
        costs.observe(rows, drafted, NO_CONTEXT, taken)


def _measured(rows: int, drafted: int) -> float:
    return MEASURED.of_step(rows, drafted)


def test_costs_are_read_as_monotone_and_grow_in_proportion_beyond_the_last() -> None:
    cost = CostModel(target={2: 1.0, 4: 3.0, 8: 2.0, 16: 4.0}, draft={1: 0.5})
    assert [cost.of_step(rows, 0) for rows in (1, 2, 4, 6, 8, 12, 32)] == [1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 8.0]
    assert cost.of_step(1, 4) - cost.of_step(1, 0) == 2.0


@pytest.mark.parametrize("bad", [{}, {0: 1.0}, {1: 0.0}, {1: -1.0}, {1: float("inf")}])
def test_tables_that_make_no_sense_are_refused(bad: dict[int, float]) -> None:
    with pytest.raises(ValidationError):
        CostModel(target=bad, draft={1: 1.0})


def test_what_was_measured_holds_until_steps_say_otherwise() -> None:
    assert seconds(TimeEstimate(MEASURED), 24, 8) == pytest.approx(_measured(24, 8))


def test_a_busy_machine_is_followed_within_a_hundred_steps_and_for_widths_that_are_not_served_either() -> None:
    costs = TimeEstimate(MEASURED)
    serve(costs, 8, 8, 1.0, 200)
    serve(costs, 8, 8, 2.0, 100, seed=1)
    assert seconds(costs, 8, 8) == pytest.approx(2 * _measured(8, 8), rel=0.1)
    assert seconds(costs, 64, 8) == pytest.approx(2 * _measured(64, 8), rel=0.35)
    assert seconds(costs, 8, 0) == pytest.approx(2 * _measured(8, 0), rel=0.35)


def test_one_step_that_took_very_long_changes_little_and_nothing_of_one_width_beside_another() -> None:
    costs = TimeEstimate(MEASURED)
    serve(costs, 8, 8, 1.0, 100)
    before = ratio(costs)
    costs.observe(8, 8, NO_CONTEXT, 50 * _measured(8, 8))
    assert seconds(costs, 8, 8) == pytest.approx(_measured(8, 8), rel=0.2)
    assert ratio(costs) == pytest.approx(before, rel=0.02)
    serve(costs, 8, 8, 1.0, 1)
    assert seconds(costs, 8, 8) == pytest.approx(_measured(8, 8), rel=0.1)


def ratio(costs: TimeEstimate) -> float:
    """Of steps of one width with a draft and steps without."""
    return seconds(costs, 16, 8) / seconds(costs, 8, 0)


def test_a_neighbour_that_comes_with_one_width_and_goes_with_another_says_little_of_the_two() -> None:
    costs = TimeEstimate(MEASURED)
    for round_ in range(10):
        serve(costs, 8, 0, 1.0, 10, seed=round_)
        serve(costs, 16, 8, 1.0, 10, seed=round_)
    serve(costs, 8, 0, 1.8, 25)
    assert ratio(costs) == pytest.approx(ratio(TimeEstimate(MEASURED)), rel=0.05)
    serve(costs, 16, 8, 1.0, 20)
    assert ratio(costs) == pytest.approx(ratio(TimeEstimate(MEASURED)), rel=0.06)


def test_what_is_not_served_is_known_less_and_less() -> None:
    costs = TimeEstimate(MEASURED)
    serve(costs, 8, 0, 1.0, 50)
    serve(costs, 64, 8, 1.0, 50)
    before = costs.uncertainty(8, 64)[0]
    serve(costs, 64, 8, 1.0, 300)
    assert costs.uncertainty(8, 64)[0] > before


def test_what_was_learnt_is_where_the_next_run_begins_and_is_known_a_little_less() -> None:
    costs = TimeEstimate(MEASURED)
    for round_ in range(30):
        serve(costs, 8, 0, 3.0, 5, seed=round_)
        serve(costs, 64, 8, 4.2, 5, seed=round_)
    again = TimeEstimate(MEASURED, LearntCosts.model_validate_json(costs.learnt.model_dump_json()))
    for rows, drafted in ((8, 0), (64, 8), (256, 8), (1, 0)):
        assert seconds(again, rows, drafted) == pytest.approx(seconds(costs, rows, drafted), rel=1e-4)
    new, now, then = (float(known.uncertainty(8, 64)[0]) for known in (TimeEstimate(MEASURED), again, costs))
    assert then < now < new / 2


def test_a_unit_is_where_a_guess_begins_and_nothing_more_is_known() -> None:
    costs = TimeEstimate(MEASURED, LearntCosts.of_unit(0.01))
    assert seconds(costs, 24, 8) == pytest.approx(0.01 * _measured(24, 8))
    assert costs.uncertainty(8, 64)[0] == pytest.approx(SURPRISE * TimeEstimate(MEASURED).uncertainty(8, 64)[0])


def test_what_a_step_without_a_draft_would_settle_is_what_is_not_known_of_it() -> None:
    costs = TimeEstimate(MEASURED)
    serve(costs, 64, 8, 1.0, 30)
    doubt, settled = costs.uncertainty(8, 64)
    assert 0.8 * doubt < settled <= doubt
    serve(costs, 8, 0, 1.0, 30)
    serve(costs, 64, 8, 1.0, 1)
    assert costs.uncertainty(8, 64)[1] < 0.5 * settled
    only_off = TimeEstimate(MEASURED)
    serve(only_off, 8, 0, 1.0, 30)
    assert only_off.uncertainty(8, 64)[1] < 0.2 * only_off.uncertainty(8, 64)[0]


@pytest.mark.parametrize("bad", [{"mean": [0.0]}, {"mean": [float("nan")] * 2 * NODES}, {"mean": [0.0], "x": 1}])
def test_learnt_costs_that_are_none_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LearntCosts.model_validate(bad)


def test_jobs_are_timed_in_turns_and_those_that_do_not_repeat_their_least_are_timed_on() -> None:
    ran: list[str] = []
    disturbed = iter([9.0, 1.0, 1.5, 2.0, 1.5, 1.02])  # the first is the warm-up

    def timed(job: str) -> float:
        ran.append(job)
        return 1.0 if job == "quiet" else next(disturbed)

    found = time_in_turns(["quiet", "disturbed"], timed, 2, 9)
    assert ran == ["quiet", "disturbed"] * 3 + ["disturbed"] * 3
    assert found == {"quiet": [1.0, 1.0], "disturbed": [1.0, 1.5, 2.0, 1.5, 1.02]}
