"""The parts of the plug-in that need no vLLM: accounting for tensors, widths, steps and their time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_serve.deployment import COST_TABLE, given_cost
from dflash_serve.errors import UserError
from dflash_serve.speculation.costs import CostModel, LearntCosts
from dflash_serve.speculation.policy import Step, WidthPolicy
from dflash_serve.speculation.width import AutoWidth
from dflash_vllm.plugin import steps
from dflash_vllm.plugin.guards import account
from dflash_vllm.plugin.steps import StepClock, decoding_steps, is_even, steps_by_width
from dflash_vllm.plugin.widths import ANY, CLEAN, LiveWidths, make_widths
from dflash_vllm.schedule import GUESSED_COSTS

PARAMETERS = [
    *("model.embed_tokens.weight", "lm_head.weight", "model.mask_embedding", "model.fc.weight", "model.norm.weight"),
    *("model.hidden_norm.weight", "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"),
    "model.layers.0.self_attn.k_norm.weight",
]
TENSORS = [
    *("fc.weight", "norm.weight", "hidden_norm.weight", "layers.0.self_attn.k_norm.weight"),
    *(f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"),
    *(f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")),
]


def test_a_drafter_that_fits_is_accounted_for_under_any_of_its_names() -> None:
    assert account(TENSORS, PARAMETERS) == ([], [])
    assert account([f"model.{name}" for name in TENSORS], PARAMETERS) == ([], [])
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    assert account([renamed.get(name, name) for name in TENSORS], PARAMETERS) == ([], [])
    assert account([*TENSORS, "lm_head.weight", "d2t", "t2d", "layers.0.rotary_emb.inv_freq"], PARAMETERS) == ([], [])


@pytest.mark.parametrize("name", TENSORS)
def test_every_missing_tensor_is_named(name: str) -> None:
    assert account([other for other in TENSORS if other != name], PARAMETERS) == ([], [name])


@pytest.mark.parametrize(
    "name", ["layers.0.self_attn.q_proj.bias", "layers.7.mlp.up_proj.weight", "markov_head.weight"]
)
def test_every_tensor_that_goes_nowhere_is_named(name: str) -> None:
    assert account([*TENSORS, name], PARAMETERS) == ([name], [])


def output(rows: dict[str, int], drafted: dict[str, int], new: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=rows,
        scheduled_spec_decode_tokens={name: [0] * count for name, count in drafted.items()},
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
    )


def test_a_step_tells_of_the_requests_that_decoded_and_had_not_ended() -> None:
    rows = {"drafting": 4, "plain": 1, "prompt": 40, "short prompt": 1, "chunk": 5, "ended": 4}
    step = output(rows, {"drafting": 3, "ended": 3}, new=("prompt", "short prompt"))
    assert decoding_steps(step, {"drafting": 2}) == {"drafting": (4, 2), "plain": (1, 0)}


@pytest.mark.parametrize(
    ("rows", "drafts", "even"),
    [
        ({"a": 4, "b": 4}, 3, True),
        ({"a": 1, "b": 1}, 0, True),
        ({"a": 1, "b": 1}, 3, False),  # the first blocks are drafted: no price of a step without speculation
        ({"a": 4, "b": 4}, 0, False),  # the last ones are verified: none of a step with it
        ({"a": 4, "b": 4}, 1, False),
        ({"a": 4, "b": 1}, 3, False),
        ({"a": 4, "prompt": 9}, 3, False),
    ],
)
def test_a_step_is_timed_where_it_verifies_as_much_as_it_drafts(rows: dict[str, int], drafts: int, even: bool) -> None:
    step = output(rows, {name: count - 1 for name, count in rows.items() if name != "prompt"}, new=("prompt",))
    step.num_spec_tokens_to_schedule = drafts
    assert is_even(step, decoding_steps(step, {"a": 0, "b": 0})) == even


def test_steps_by_width_come_from_how_often_each_slot_was_offered() -> None:
    assert steps_by_width([]) == {}
    assert steps_by_width([5, 5, 2, 0]) == {3: 3, 4: 2}
    assert steps_by_width([3, 3, 3]) == {4: 3}


def test_steps_that_follow_one_another_are_timed_from_answer_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(time=0.0)
    monkeypatch.setattr(steps, "perf_counter", lambda: now.time)
    clock, found = StepClock(), []
    for begun, answered, busy in [(10, 12, True), (12.5, 15, False), (100, 101, True), (100.5, 103, True)]:
        now.time = begun
        clock.scheduled()
        now.time = answered
        found.append(clock.answered())
        clock.settled(busy=busy)
    assert found == [2, 3, 1, 2]  # the third began after a pause; the fourth was scheduled while it computed


def test_a_cost_table_that_is_none_is_named(tmp_path: Path) -> None:
    assert given_cost({}) is None
    path = tmp_path / "cost.json"
    path.write_text('{"target": {"1": 1.0, "8": 2.0}, "draft": {"1": 0.5}}')
    cost = given_cost({COST_TABLE: str(path)})
    assert cost is not None
    assert cost.target_seconds(8) == 2.0
    path.write_text('{"target": {}}')
    with pytest.raises(UserError, match=r"cost.json: no cost table"):
        given_cost({COST_TABLE: str(path)})


GUESS = CostModel(target={1: 1.0, 8: 1.0, 64: 8.0}, draft={1: 0.1, 64: 0.8})
"""In steps of one request."""
STEP_SECONDS = 0.004
"""What such a step takes."""


def serve(widths: LiveWidths, requests: int, steps: int, *, accepts: int, clean: bool = True) -> list[int]:
    """The widths of some steps in which every request's first drafted tokens are right, on a machine as guessed."""
    ids, chosen = [f"{requests}-{i}" for i in range(requests)], []
    for _ in range(steps):
        width = widths.choose(ids, 100)
        chosen.append(width)
        seconds = STEP_SECONDS * GUESS.step_seconds([width] * requests) if clean else None
        step = {name: (width, min(accepts, width - 1)) for name in ids}
        widths.verified(step, seconds=seconds, context_tokens=100)
    widths.finished(ids)
    return chosen


def policy(cost: CostModel, *, believed: bool = False, learnt: LearntCosts | None = None) -> WidthPolicy:
    return AutoWidth(cost, 8, [2, 4, 8], believed=believed, learnt=learnt)


def guessed(learnt: LearntCosts | None = None) -> LiveWidths:
    return make_widths(policy, learnt, {GUESSED_COSTS: GUESS.model_dump_json()})


def test_the_first_steps_tell_the_unit_of_a_guess_and_then_widths_follow_the_load() -> None:
    widths = guessed()
    assert serve(widths, 1, CLEAN, accepts=7) == [1] * CLEAN
    assert set(serve(widths, 1, 40, accepts=7)[-20:]) == {8}
    crowd = serve(widths, 64, 60, accepts=0)
    assert sorted(crowd)[30] == 1
    assert sorted(serve(widths, 1, 60, accepts=7))[30] == 8


def test_a_unit_is_settled_for_even_if_no_step_is_ever_clean() -> None:
    widths = guessed()
    serve(widths, 64, ANY, accepts=0, clean=False)
    assert sorted(serve(widths, 64, 40, accepts=0, clean=False))[20] == 1


def test_a_cost_table_that_was_measured_is_believed(tmp_path: Path) -> None:
    """Off from the first step of a crowd on, whatever was earned before and whatever steps take."""
    path = tmp_path / "cost.json"
    path.write_text(GUESS.model_dump_json())
    widths = make_widths(policy, environment={COST_TABLE: str(path)})
    assert set(serve(widths, 1, 60, accepts=7)[-40:]) == {8}
    ids = [f"{i}" for i in range(64)]
    for _ in range(20):
        width = widths.choose(ids, 100)
        step = {name: (width, int(i % 3 == 0 and width > 1)) for i, name in enumerate(ids)}
        widths.verified(step, seconds=1e-9, context_tokens=100)
    assert width == 1


def test_without_costs_and_without_a_guess_nothing_starts() -> None:
    with pytest.raises(UserError, match="start it by `dflash-serve serve`"):
        make_widths(policy, environment={})


def test_what_the_last_run_learnt_of_a_guess_spares_the_next_one_finding_out() -> None:
    """On a machine where steps with a draft take twice the guess, which makes them a loss."""
    ids = [f"{i}" for i in range(4)]

    def crowd(policy: WidthPolicy, steps: int) -> int:
        drafted = 0
        for step in range(steps):
            widths = policy.widths(ids)
            accepted = [min(width - 1, int((i + step) % 2)) for i, width in enumerate(widths)]
            drafting = max(widths) > 1
            seconds = STEP_SECONDS * GUESS.step_seconds(widths) * (2 if drafting else 1)
            policy.observe(Step(ids, widths, accepted, seconds))
            drafted += drafting
        return drafted

    first = AutoWidth(GUESS, 8, [2, 4, 8], learnt=LearntCosts.of_unit(STEP_SECONDS))
    tried = crowd(first, 100)
    learnt = LearntCosts.model_validate_json(first.times.learnt.model_dump_json())
    second = guessed(learnt)
    assert crowd(second.policy, 100) < tried / 2


def test_a_crowd_in_the_first_steps_does_not_keep_one_stream_from_drafting() -> None:
    """Finding the unit costs no drafts, so it cannot leave the policy in debt."""
    widths = guessed()
    serve(widths, 12, CLEAN + 8, accepts=2)
    assert sorted(serve(widths, 1, 60, accepts=3))[30] >= 4
