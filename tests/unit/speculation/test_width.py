"""The width policy: its bound, what it learns, and the widths that it takes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_serve.speculation.costs import CostModel
from dflash_serve.speculation.policy import FixedWidth, Pace, Step, WidthPolicy
from dflash_serve.speculation.width import DEBT, HOLD, PAUSE_AFTER, REFILL, START, AutoWidth

CHEAP = CostModel(target={1: 1.0, 16: 1.1, 512: 8.0}, draft={1: 0.1, 32: 0.2})
DEAR = CostModel(target={1: 1.0, 16: 16.0}, draft={1: 0.5})  # a row costs what a token is worth: nothing can pay
NEARLY = CostModel(target={1: 1.0, 16: 10.0}, draft={1: 0.2})  # four of five drafted tokens would have to be accepted
MEDIUM = CostModel(target={1: 1.0, 2: 1.3, 8: 1.6, 64: 4.0, 256: 16.0}, draft={1: 0.3, 32: 0.6})
BRISK = CostModel(target={1: 0.01, 16: 0.011, 512: 0.08}, draft={1: 0.001, 32: 0.002})  # decisions stand for some steps
KNOWN = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]
Luck = Callable[[int, int], int]
"""Of a step and a request: how many tokens of a whole block would be accepted."""


def lucky(conditional: Sequence[float], seed: int = 5) -> Luck:
    chance = random.Random(seed)
    return lambda step, request: sum(1 for _ in itertools.takewhile(lambda h: chance.random() < h, conditional))


def serve(
    policy: WidthPolicy, luck: Luck, n: int, steps: int, cost: CostModel, truth: CostModel | None = None
) -> tuple[float, int]:
    """(tokens per second, steps that drafted) of n requests in a simulated engine whose steps cost `truth`."""
    spent, tokens, drafted, ids = 0.0, 0, 0, [f"request {i}" for i in range(n)]
    for number in range(steps):
        widths = policy.widths(ids)
        accepted = [min(luck(number, i), width - 1) for i, width in enumerate(widths)]
        seconds = (truth or cost).step_seconds(widths)
        policy.observe(Step(ids, widths, accepted, seconds))
        spent, tokens, drafted = spent + seconds, tokens + n + sum(accepted), drafted + (max(widths) > 1)
    return tokens / spent, drafted


def time_lost(policy: AutoWidth, luck: Luck, n: int, steps: int, cost: CostModel) -> list[float]:
    """After each step: seconds beyond those that speculation off would have taken for the same tokens, in its steps."""
    lost, so_far, ids, off = [], 0.0, list(range(n)), cost.step_seconds([1] * n)
    for number in range(steps):
        widths = policy.widths(ids)
        accepted = [min(luck(number, i), width - 1) for i, width in enumerate(widths)]
        policy.observe(Step(ids, widths, accepted))
        so_far += cost.step_seconds(widths) / off - (n + sum(accepted)) / n
        lost.append(so_far)
    return lost


@settings(deadline=None, max_examples=40)
@given(
    good=st.lists(st.integers(1, 120), min_size=1, max_size=4),
    n=st.integers(1, 6),
    allowed=st.sampled_from([None, [2, 4, 8]]),
    cost=st.sampled_from([CHEAP, MEDIUM, DEAR, BRISK]),
    known=st.sampled_from([None, KNOWN]),
)
def test_no_drafter_makes_any_stretch_slower_than_off_by_more_than_the_bound(
    good: list[int], n: int, allowed: list[int] | None, cost: CostModel, known: list[float] | None
) -> None:
    """A drafter that is perfect for a while and useless for a while, again and again: as nasty as it can be."""
    ends = list(itertools.accumulate(good))
    policy = AutoWidth(cost, 8, allowed, known)
    lost = time_lost(policy, lambda step, _: 7 * (sum(step >= end for end in ends) % 2 == 0), n, 400, cost)
    dearest = max(cost.step_seconds([w] * n) / cost.step_seconds([1] * n) - 1 for w in range(2, 9))
    most, least = 0.0, 0.0
    for step, each in enumerate(lost):
        least = min(least, each - REFILL * step)
        most = max(most, each - REFILL * step - least)
    assert most <= 2 * DEBT + dearest + REFILL
    assert max(each - REFILL * step for step, each in enumerate(lost)) <= START + DEBT + dearest + REFILL


@pytest.mark.parametrize(
    ("cost", "n", "allowed"), [(CHEAP, 1, None), (CHEAP, 32, [2, 4, 8]), (MEDIUM, 8, None), (MEDIUM, 1, [2, 4, 8])]
)
def test_a_drafter_that_is_never_right_costs_next_to_nothing(
    cost: CostModel, n: int, allowed: list[int] | None
) -> None:
    assert time_lost(AutoWidth(cost, 8, allowed), lambda *_: 0, n, 500, cost)[-1] <= 7  # START, REFILL, and a few


@pytest.mark.parametrize("n", [1, 16])
def test_where_even_a_perfect_drafter_cannot_pay_next_to_nothing_is_spent(n: int) -> None:
    assert time_lost(AutoWidth(DEAR, 8), lambda *_: 7, n, 500, DEAR)[-1] <= START + 500 * REFILL


@pytest.mark.parametrize("n", [1, 8, 32])
def test_a_good_drafter_is_found_out_and_beats_every_fixed_width(n: int) -> None:
    conditional = [0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4]
    auto, _ = serve(AutoWidth(MEDIUM, 8), lucky(conditional), n, 500, MEDIUM)
    fixed = [serve(FixedWidth(width), lucky(conditional), n, 500, MEDIUM)[0] for width in range(1, 9)]
    assert auto > 0.97 * max(fixed)
    assert auto > fixed[0]


LARGE = CostModel(target={256: 1.0, 512: 1.2, 2048: 2.2}, draft={256: 2.4})  # dear to find out for 256 requests at once


def test_a_large_batch_finds_out_at_once_what_a_dear_draft_is_worth() -> None:
    """One step of 256 requests costs more than the budget begins with, and tells as much as 256 of one."""
    luck = lucky([0.95] * 7)
    auto, drafted = serve(AutoWidth(LARGE, 8), luck, 256, 100, LARGE)
    assert auto > 0.95 * serve(FixedWidth(8), luck, 256, 100, LARGE)[0]
    assert drafted >= 95
    assert time_lost(AutoWidth(LARGE, 8), lambda *_: 0, 256, 500, LARGE)[-1] <= 5


def test_what_wide_blocks_cost_more_than_was_measured_is_found_out() -> None:
    """Measured alone, eight rows cost hardly more than three; served, they do: wide blocks alone would not tell."""
    measured, served = (CostModel(target={1: 0.010, 3: 0.0125, 8: eight}, draft={1: 0.003}) for eight in (0.013, 0.018))
    ratios = []
    for seed in range(9):  # one in six begins so badly that the drafter is left alone for long
        policy = AutoWidth(measured, 8, known_survival=[0.55**slot for slot in range(1, 8)])
        serve(policy, lucky([0.55] * 7, seed), 1, 60, measured, served)
        auto, _ = serve(policy, lucky([0.55] * 7, seed + 50), 1, 200, measured, served)
        fixed = [serve(FixedWidth(width), lucky([0.55] * 7, seed + 50), 1, 200, served)[0] for width in range(2, 9)]
        ratios.append(auto / max(fixed))
    assert np.median(ratios) > 0.97


def test_early_bad_luck_is_made_good() -> None:
    """The first eight blocks fail altogether; then the drafter is as good as it is."""
    luck = lucky([0.8] * 7)
    policy = AutoWidth(MEDIUM, 8)
    auto, _ = serve(policy, lambda step, i: 0 if step < 8 else luck(step, i), 1, 300, MEDIUM)
    off, _ = serve(FixedWidth(1), luck, 1, 300, MEDIUM)
    assert auto > 1.3 * off


def test_a_drafter_that_becomes_good_is_noticed() -> None:
    policy = AutoWidth(MEDIUM, 8)
    serve(policy, lambda *_: 0, 1, 1000, MEDIUM)
    off, _ = serve(FixedWidth(1), lambda *_: 0, 1, 1000, MEDIUM)
    serve(policy, lucky([0.9] * 7), 1, 1000, MEDIUM)
    assert serve(policy, lucky([0.9] * 7), 1, 1000, MEDIUM)[0] > 1.5 * off


def test_hard_and_easy_requests_of_one_batch_get_widths_of_their_own() -> None:
    policy = AutoWidth(MEDIUM, 8)
    serve(policy, lambda _, request: 7 if request < 4 else 0, 8, 200, MEDIUM)
    widths = policy.widths([f"request {i}" for i in range(8)])
    assert min(widths[:4]) >= 7
    assert max(widths[4:]) <= 2


def test_costs_that_were_measured_wrongly_are_put_right_while_serving() -> None:
    """A draft measured beside other work, three times too dear, so that nothing seemed to pay."""
    seed = CostModel(target=MEDIUM.target, draft={size: 3 * seconds for size, seconds in MEDIUM.draft.items()})
    luck = [0.75, 0.7, 0.65, 0.6, 0.6, 0.6, 0.6]
    auto, _ = serve(AutoWidth(seed, 8), lucky(luck), 4, 1000, seed, truth=MEDIUM)
    fixed = [serve(FixedWidth(width), lucky(luck), 4, 1000, MEDIUM)[0] for width in range(1, 9)]
    assert auto > 0.95 * max(fixed)


@pytest.mark.parametrize(("gain", "drafts"), [(0.004, False), (0.04, True)])
def test_drafts_that_gain_less_than_being_ready_for_them_costs_are_but_trials(gain: float, drafts: bool) -> None:
    tokens = 1.4
    cost = CostModel(target={8: 1.0, 16: 1.2}, draft={8: tokens / (1 + gain) - 1.2})
    policy = AutoWidth(cost, 2, known_survival=[tokens - 1], believed=True)
    _, drafted = serve(policy, lambda step, request: int((2 * step + request) % 5 < 2), 8, 1000, cost)
    assert (drafted == 1000) if drafts else (drafted < 500)


@pytest.mark.filterwarnings("error")  # 256 requests that are always right have infinite odds
@pytest.mark.parametrize(("requests", "steps"), [(1, 256), (4, 64), (8, 32), (16, 16), (256, 16)])
def test_speculation_pauses_after_as_many_tokens_without_a_draft(requests: int, steps: int) -> None:
    policy = AutoWidth(DEAR, 8, known_survival=[0.01] * 7, believed=True)
    serve(policy, lambda *_: 0, requests, steps - 1, DEAR)
    assert not policy.paused
    serve(policy, lambda *_: 0, requests, 1, DEAR)
    assert policy.paused
    drafting = AutoWidth(CHEAP, 8)
    serve(drafting, lambda *_: 7, requests, 2 * steps, CHEAP)
    assert not drafting.paused


def test_speculation_resumes_for_requests_to_come_where_those_of_now_cannot_be_drafted_for() -> None:
    """Requests that lived through a pause cannot be drafted for; requests that join while it is over can."""
    policy = AutoWidth(CHEAP, 8, known_survival=[0.9] * 7)
    ids = [f"request {i}" for i in range(16)]
    for _ in range(4 * PAUSE_AFTER):
        assert policy.widths(ids, 0, set(ids)) == [1] * 16
        policy.observe(Step(ids, [1] * 16, [0] * 16, CHEAP.step_seconds([1] * 16)))
        assert not policy.paused
    others = [f"new {i}" for i in range(12)]
    assert max(policy.widths([*ids[:4], *others], 0, set(ids[:4]))) > 1


def test_speculation_resumes_for_new_requests_and_pauses_for_long_after() -> None:
    """Over HTTP sixteen requests stayed ready for drafts in nine steps of ten, and none was ever drafted for."""
    policy, luck = AutoWidth(NEARLY, 8, known_survival=[0.5] * 7), lucky([0.5] * 7)
    serve(policy, luck, 16, 10 * PAUSE_AFTER, NEARLY)
    ids, undraftable, ready, drafted = list(range(16)), set[int](), 0, 0
    for number in range(6000):
        if number % 4 == 0:  # the oldest leaves, another comes
            gone = ids.pop(0)
            policy.forget(gone)
            undraftable.discard(gone)
            ids.append(16 + number)
        chosen = policy.widths(ids, 0, frozenset(undraftable))
        widths = [1 if i in undraftable else width for i, width in zip(ids, chosen, strict=True)]
        if policy.paused:
            undraftable.update(ids)
        accepted = [min(luck(number, i), width - 1) for i, width in zip(ids, widths, strict=True)]
        policy.observe(Step(ids, widths, accepted, NEARLY.step_seconds(widths)))
        ready, drafted = ready + (not policy.paused), drafted + (max(widths) > 1)
    assert drafted > 10
    assert ready < 0.3 * 6000


def test_only_draftable_requests_count_for_the_worth_of_a_draft() -> None:
    """A draft for one of eight costs nearly as much as for all, and gains an eighth."""
    cost = CostModel(target={1: 1.0, 8: 1.0, 64: 1.5}, draft={1: 1.0, 8: 1.1})
    policy = AutoWidth(cost, 8, known_survival=[0.9] * 7, believed=True)
    ids = list(range(8))
    assert min(policy.widths(ids)) > 1
    others = [*range(10, 17), 7]
    assert policy.widths(others, 0, frozenset(range(10, 17))) == [1] * 8
    first, *rest = policy.widths(range(20, 28), 0, {20})
    assert first == 1 < min(rest)


def counted_decisions(policy: AutoWidth, monkeypatch: pytest.MonkeyPatch) -> Mock:
    decided = Mock(side_effect=policy.times.uncertainty)  # asked for once a decision
    monkeypatch.setattr(policy.times, "uncertainty", decided)
    return decided


@pytest.mark.parametrize(
    ("cost", "known", "before", "steps"),
    [(BRISK, [0.9] * 7, 1, HOLD), (CHEAP, [0.9] * 7, 1, 1), (DEAR, None, 3 * PAUSE_AFTER, HOLD)],
    ids=["short steps", "long steps", "long steps, paused"],
)
def test_a_decision_stands_for_some_steps_of_the_same_requests(
    cost: CostModel, known: list[float] | None, before: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = AutoWidth(cost, 8, known_survival=known)
    accepted = 0 if known is None else 7
    serve(policy, lambda *_: accepted, 2, before, cost)
    decided = counted_decisions(policy, monkeypatch)
    serve(policy, lambda *_: accepted, 2, 100 * steps, cost)
    assert 100 <= decided.call_count < 115  # and a trial now and then
    decided.reset_mock()
    for request in range(10):
        policy.widths([request])
    assert decided.call_count == 10


HOPELESS = CostModel(target={1: 0.02, 16: 0.02, 128: 0.16}, draft={1: 0.2})


def test_not_to_draft_stands_while_a_few_of_many_requests_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP a request joins or leaves every few steps, and a decision takes some 0.8 ms."""
    policy = AutoWidth(HOPELESS, 8)
    serve(policy, lambda *_: 0, 16, 3 * PAUSE_AFTER, HOPELESS)
    decided = counted_decisions(policy, monkeypatch)
    for number in range(20 * HOLD):
        ids = [f"request {number // 2 + i}" for i in range(16 + number % 2)]
        policy.observe(Step(ids, policy.widths(ids), [0] * len(ids), HOPELESS.step_seconds([1] * len(ids))))
        policy.forget(f"request {number // 2 - 1}")
    assert 20 <= decided.call_count <= 40
    assert len(policy.acceptance.offsets) <= 16 + HOLD


@pytest.mark.parametrize("others", [["new"] * 16, ["request 0"], [f"request {i}" for i in range(40)]])
def test_other_requests_or_many_more_or_fewer_are_decided_anew(
    others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = AutoWidth(HOPELESS, 8)
    serve(policy, lambda *_: 0, 16, 3 * PAUSE_AFTER, HOPELESS)
    ids = [f"request {i}" for i in range(16)]
    decided, count = counted_decisions(policy, monkeypatch), -1
    while decided.call_count != count:  # until the decision before stands yet
        count = decided.call_count
        policy.observe(Step(ids, policy.widths(ids), [0] * 16, HOPELESS.step_seconds([1] * 16)))
    policy.widths(others)
    assert decided.call_count == count + 1


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed_widths"):
        AutoWidth(CHEAP, 8, [16])
    with pytest.raises(ValueError, match="0 <= accepted < width"):
        AutoWidth(CHEAP, 8).observe(Step("a", [2], [2]))
    assert AutoWidth(CHEAP, 8).widths([]) == []


@pytest.mark.parametrize("seed", range(3))
def test_what_one_request_gained_is_not_lost_on_trials_of_many(seed: int) -> None:
    """Costs scatter, and drafts for sixteen might just pay: as with vLLM on two cores, where this cost a tenth."""
    cost = CostModel(target={1: 0.06, 2: 0.062, 8: 0.065, 16: 0.08, 64: 0.17}, draft={1: 0.005, 16: 0.045})
    known, noise = [0.65**slot for slot in range(1, 8)], np.random.default_rng(seed)
    policy = AutoWidth(cost, 8, [4, 8], known)
    serve(policy, lambda *_: 3, 1, 100, cost)
    spent, tokens, ids = 0.0, 0, [f"request {i}" for i in range(16)]
    for _ in range(200):
        widths = policy.widths(ids)
        accepted = [min(int(noise.geometric(0.35)) - 1, width - 1) for width in widths]
        seconds = cost.step_seconds(widths)
        policy.observe(Step(ids, widths, accepted, seconds * float(np.exp(0.05 * noise.normal()))))
        spent, tokens = spent + seconds, tokens + len(ids) + sum(accepted)
    assert tokens / spent >= 0.96 * 16 / cost.step_seconds([1] * 16)


@pytest.mark.parametrize("allowed", [None, [2, 4, 8]])
@pytest.mark.parametrize(("cost", "n"), [(CHEAP, 1), (MEDIUM, 8), (DEAR, 4)])
def test_the_pace_is_as_expected_where_all_time_is_decoding_and_falls_with_what_prompts_take(
    cost: CostModel, n: int, allowed: list[int] | None
) -> None:
    conditional = [0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4]
    headroom = []
    for prompts in (0.0, 1.0):  # seconds of prompts for each second of decoding
        policy, luck, now = AutoWidth(cost, 8, allowed), lucky(conditional), [0.0]
        pace, before, ids = Pace(partial(now.__getitem__, 0)), (0.0, 0.0), list(range(n))
        for number in range(800):
            if number == 400:  # the drafter is known by now
                before = pace.gained, pace.expected
            widths = policy.widths(ids)
            seconds, accepted = cost.step_seconds(widths), [min(luck(number, i), w - 1) for i, w in enumerate(widths)]
            now[0] += seconds * (1 + prompts)
            step = Step(ids, widths, accepted, seconds)
            pace.add(step, policy.expected_rate)
            policy.observe(step)
        headroom.append((pace.gained - before[0]) / (pace.expected - before[1]))
    assert headroom[0] == pytest.approx(1, abs=0.1)
    assert headroom[1] == pytest.approx(headroom[0] / 2, rel=0.01)


def test_an_idle_time_is_no_time_of_a_step() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    for request_id, at in (("a", 1.0), ("a", 2.0), ("b", 90.0), ("b", 91.0)):
        now[0] = at
        pace.add(Step([request_id], [4], [1]), 2.0)
        pace.add(Step([], [], []), 2.0)  # prompts alone
    assert (pace.gained, pace.expected) == (4, 4)
