import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dflash_serve.speculation.allocation import CostModel, choose_widths
from dflash_serve.speculation.width import AutoWidth, FixedWidth, SurvivalEstimate, WidthPolicy, survival_of

CHEAP = CostModel(target={1: 1.0, 16: 1.1, 512: 8.0}, draft={1: 0.1, 32: 0.2})
DEAR = CostModel(target={1: 1.0, 16: 16.0}, draft={1: 0.5})  # a row costs what a token is worth: nothing can pay
MEDIUM = CostModel(target={1: 1.0, 2: 1.3, 8: 1.6, 64: 4.0, 256: 16.0}, draft={1: 0.3, 32: 0.6})

chances = st.floats(0, 1)
seconds = st.floats(0.01, 10)
survivals = st.lists(chances, max_size=3).map(lambda h: survival_of(h))
costs = st.builds(
    CostModel,
    target=st.dictionaries(st.integers(1, 16), seconds, min_size=1, max_size=8),
    draft=st.dictionaries(st.integers(1, 4), seconds, min_size=1),
)


def rate(widths: Sequence[int], survival: Sequence[Sequence[float]], cost: CostModel) -> float:
    tokens = sum(1 + sum(s[: width - 1]) for width, s in zip(widths, survival, strict=True))
    return tokens / cost.step_seconds(list(widths))


@settings(max_examples=300, deadline=None)
@given(survival=st.lists(survivals, min_size=1, max_size=4), cost=costs, max_width=st.integers(1, 4))
def test_no_choice_of_widths_is_faster_than_the_chosen_one(
    survival: list[list[float]], cost: CostModel, max_width: int
) -> None:
    chosen = choose_widths(survival, cost, max_width=max_width)
    choices = list(itertools.product(*(range(1, min(len(s) + 1, max_width) + 1) for s in survival)))
    assert tuple(chosen) in choices
    assert rate(chosen, survival, cost) == pytest.approx(max(rate(c, survival, cost) for c in choices))


@settings(max_examples=100, deadline=None)
@given(survival=st.lists(survivals, min_size=1, max_size=4), cost=costs)
def test_no_allowed_shared_width_is_faster_than_the_chosen_one(survival: list[list[float]], cost: CostModel) -> None:
    chosen = choose_widths(survival, cost, max_width=4, allowed_widths=[2, 4])
    assert len(set(chosen)) == 1
    assert chosen[0] in (1, 2, 4)
    best = max(rate([width] * len(survival), survival, cost) for width in (1, 2, 4))
    assert rate(chosen, survival, cost) == pytest.approx(best)


def test_a_likely_request_gets_the_rows_that_an_unlikely_one_does_not() -> None:
    likely, unlikely = survival_of([0.95] * 7), survival_of([0.1] * 7)
    widths = choose_widths([likely, unlikely], MEDIUM, max_width=8)
    assert widths[0] == 8
    assert widths[1] == 1


def test_an_empty_batch_has_no_widths() -> None:
    assert choose_widths([], CHEAP, max_width=8) == []
    assert choose_widths([], CHEAP, max_width=8, allowed_widths=[2]) == []
    assert AutoWidth(CHEAP, 8).widths([]) == []


def test_cost_is_interpolated_monotone_and_never_extrapolated_downwards() -> None:
    cost = CostModel(target={2: 1.0, 4: 3.0, 8: 2.0, 16: 4.0}, draft={1: 0.5})
    assert [cost.target_seconds(rows) for rows in (1, 2, 3, 4, 8, 12, 16, 32)] == [1, 1, 1.5, 2, 2, 3, 4, 8]
    assert cost.draft_seconds(3) == 1.5
    assert cost.step_seconds([1, 1]) == 1.0
    assert cost.step_seconds([1, 2]) == 1.5 + 1.0


def test_cost_goes_to_json_and_back() -> None:
    assert CostModel.model_validate_json(MEDIUM.model_dump_json()) == MEDIUM


@pytest.mark.parametrize("bad", [{}, {0: 1.0}, {1: 0.0}, {1: float("inf")}])
def test_a_cost_that_was_not_measured_is_refused(bad: dict[int, float]) -> None:
    with pytest.raises(ValidationError):
        CostModel(target=bad, draft={1: 1.0})


def simulate(estimate: SurvivalEstimate, conditional: Sequence[float], width: int, steps: int, seed: int = 0) -> None:
    chance = random.Random(seed)
    for _ in range(steps):
        hits = itertools.takewhile(lambda h: chance.random() < h, conditional[: width - 1])
        estimate.observe(width, sum(1 for _ in hits))


def test_survival_is_learnt_whatever_the_width() -> None:
    conditional = [0.9, 0.8, 0.7, 0.6]
    estimate = SurvivalEstimate(4, memory=2000, strength=8)
    simulate(estimate, conditional, 5, 3000)
    simulate(estimate, conditional, 2, 3000, seed=1)
    assert survival_of(estimate.conditional()) == pytest.approx(survival_of(conditional), abs=0.05)


def test_a_slot_never_offered_is_thought_to_be_like_the_one_before() -> None:
    estimate = SurvivalEstimate(4, memory=500, strength=8)
    simulate(estimate, [0.9, 0.9], 3, 1000)
    h = estimate.conditional()
    assert h[2] == h[3] == h[1]
    assert h[1] == pytest.approx(0.9, abs=0.05)


def test_a_new_request_is_thought_to_be_like_the_batch_and_then_like_itself() -> None:
    batch, request = SurvivalEstimate(3, memory=500, strength=8), SurvivalEstimate(3, memory=32, strength=8)
    simulate(batch, [0.9, 0.9, 0.9], 4, 500)
    prior = batch.conditional()
    assert request.conditional(prior) == pytest.approx(prior)
    request.observe(4, 0)
    assert request.conditional(prior)[0] == pytest.approx(prior[0] * 8 / 9)
    assert request.conditional(prior)[1:] == pytest.approx(prior[1:])  # slot 1 failed: nothing learnt of the others
    simulate(request, [0.1, 0.1, 0.1], 4, 200)
    assert request.conditional(prior)[0] < 0.4


def test_the_past_fades() -> None:
    estimate = SurvivalEstimate(1, memory=20, strength=1)
    simulate(estimate, [1.0], 2, 500)
    simulate(estimate, [0.0], 2, 60)
    assert estimate.conditional()[0] < 0.1


def serve(policy: WidthPolicy, conditional: Sequence[float], n: int, steps: int, cost: CostModel) -> tuple[float, int]:
    """(tokens per second, steps that drafted) of n requests in a simulated engine."""
    chance, spent, tokens, drafted = random.Random(5), 0.0, 0, 0
    ids = [f"request {i}" for i in range(n)]
    for _ in range(steps):
        widths = policy.widths(ids)
        spent, drafted = spent + cost.step_seconds(widths), drafted + (max(widths) > 1)
        for request_id, width in zip(ids, widths, strict=True):
            hits = itertools.takewhile(lambda h: chance.random() < h, conditional[: width - 1])
            accepted = sum(1 for _ in hits)
            policy.observe(request_id, width, accepted)
            tokens += accepted + 1
    return tokens / spent, drafted


@pytest.mark.parametrize("allowed", [None, [2, 4, 8]])
@pytest.mark.parametrize("n", [1, 8, 32])
@pytest.mark.parametrize("cost", [CHEAP, MEDIUM], ids=["cheap", "medium"])
def test_a_drafter_that_is_never_right_costs_no_more_than_the_probes(
    cost: CostModel, n: int, allowed: list[int] | None
) -> None:
    steps, policy = 3000, AutoWidth(cost, 8, allowed)
    off, _ = serve(FixedWidth(1), [0.0] * 7, n, steps, cost)
    auto, _ = serve(policy, [0.0] * 7, n, steps, cost)
    finding_out = 12 * cost.step_seconds([8] * n) / (steps * cost.step_seconds([1] * n))
    assert auto >= off / (1 + policy.probe_budget + finding_out)


@pytest.mark.parametrize("n", [1, 16])
def test_where_even_a_perfect_drafter_cannot_pay_none_is_asked(n: int) -> None:
    assert serve(AutoWidth(DEAR, 8), [1.0] * 7, n, 500, DEAR)[1] == 0


@pytest.mark.parametrize("n", [1, 8, 32])
def test_a_good_drafter_is_found_out_and_beats_every_fixed_width(n: int) -> None:
    conditional = [0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4]
    auto, _ = serve(AutoWidth(MEDIUM, 8), conditional, n, 1500, MEDIUM)
    fixed = [serve(FixedWidth(width), conditional, n, 1500, MEDIUM)[0] for width in range(1, 9)]
    assert auto > 0.96 * max(fixed)
    assert auto > fixed[0]


def test_a_drafter_that_becomes_good_is_noticed() -> None:
    policy = AutoWidth(MEDIUM, 8, batch_memory=64)
    serve(policy, [0.0] * 7, 1, 1000, MEDIUM)
    off, _ = serve(FixedWidth(1), [0.9] * 7, 1, 1000, MEDIUM)
    serve(policy, [0.9] * 7, 1, 3000, MEDIUM)
    assert serve(policy, [0.9] * 7, 1, 1000, MEDIUM)[0] > 1.3 * off


def test_probes_go_round_the_batch() -> None:
    policy = AutoWidth(CHEAP, 4, probe_interval=2, probe_budget=1.0)
    serve(policy, [0.0] * 3, 3, 300, CHEAP)
    probed = [widths.index(4) for widths in (policy.widths("abc") for _ in range(12)) if 4 in widths]
    assert set(probed) == {0, 1, 2}


def test_fixed_widths_stay_and_nonsense_is_refused() -> None:
    policy: WidthPolicy = FixedWidth(4)
    policy.observe("a", 4, 3)
    policy.forget("a")
    assert policy.widths(["a", "b"]) == [4, 4]
    with pytest.raises(ValueError, match="width 0"):
        FixedWidth(0)
    with pytest.raises(ValueError, match="allowed_widths"):
        AutoWidth(CHEAP, 8, [16])
    with pytest.raises(ValueError, match="0 <= accepted < width"):
        AutoWidth(CHEAP, 8).observe("a", 2, 2)


def test_a_request_that_ended_is_forgotten() -> None:
    policy = AutoWidth(CHEAP, 8)
    policy.widths(["a"])
    policy.forget("a")
    policy.forget("never seen")
    assert not policy._requests
