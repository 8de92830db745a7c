"""Which width the plug-in gives a batch, and which results it learns from; no SGLang needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_serve.deployment import COST_TABLE, given_cost
from dflash_serve.errors import UserError
from dflash_serve.speculation.costs import CostModel
from dflash_serve.speculation.policy import FixedWidth
from dflash_serve.speculation.width import AutoWidth
from dflash_sglang.launch_plan import WIDTH_VARIABLE, narrow_widths
from dflash_sglang.plugin.results import StepResult, Steps
from dflash_sglang.plugin.widths import AUTO, BatchWidths, asked_width


class Heard(list[StepResult]):
    def verified(self, step: StepResult) -> None:
        self.append(step)


def request(rid: str, finished: bool = False, retracted: bool = False) -> Any:
    return SimpleNamespace(rid=rid, finished=lambda: finished, is_retracted=retracted)


def result(width: int, *accepted: int) -> Any:
    return SimpleNamespace(speculative_num_draft_tokens=width, num_correct_drafts_per_req_cpu=list(accepted))


def test_only_what_sglang_counts_is_counted() -> None:
    steps, heard = Steps(), Heard()
    steps.listeners.append(heard)
    batch = SimpleNamespace(reqs=[request("a"), request("b", finished=True), request("c", retracted=True)])
    assert steps.on_result(lambda *_: "settled", None, result(4, 2, 3, 1), batch) == "settled"
    assert [(step.width, step.accepted, step.seconds) for step in heard] == [(4, [("a", 2)], None)]


def test_a_steps_time_is_that_from_the_result_before_and_none_where_a_prefill_came_between() -> None:
    steps, heard, batch = Steps(), Heard(), SimpleNamespace(reqs=[request("a")])
    steps.listeners.append(heard)
    first, second, third = (result(4, 1) for _ in range(3))
    steps.launched(first, context_tokens=7)
    steps.launched(second)  # launched before the first one's result is read, as with overlapped scheduling
    steps.on_result(lambda *_: None, None, first, batch)
    steps.on_result(lambda *_: None, None, second, batch)
    steps.launched()
    steps.launched(third)
    steps.on_result(lambda *_: None, None, third, batch)
    assert [step.seconds is None for step in heard] == [True, False, True]
    assert [step.context_tokens for step in heard] == [7, 0, 0]


def test_a_narrow_step_costs_what_its_batch_says() -> None:
    flat_then_steep = CostModel(target={1: 1.0, 8: 1.0, 128: 16.0}, draft={1: 0.1, 16: 0.1})
    offered = [1, 2, 4, 8]
    widths = BatchWidths(AutoWidth(flat_then_steep, 8, offered), offered)
    for _ in range(40):  # a drafter that is right three times in a row
        alone = widths.choose(["a"])
        widths.verified(StepResult(alone, 1, [("a", min(3, alone - 1))], None))
    crowd = [str(i) for i in range(16)]
    narrow = [widths.choose(crowd) for _ in range(20)]
    assert alone >= 4
    assert sorted(narrow)[10] < alone


def test_requests_that_have_ended_are_forgotten() -> None:
    told: list[object] = []
    policy = FixedWidth(4)
    widths = BatchWidths(policy, [4])
    widths.choose(["a"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FixedWidth, "observe", lambda _, step: told.extend(step.request_ids))
        widths.finished("a")
        widths.verified(StepResult(4, 1, [("a", 1)], None))
    assert told == []


@pytest.mark.parametrize("failing", ["widths", "observe", "forget"])
def test_a_policy_that_fails_is_replaced_by_whole_blocks(failing: str, caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        paused = False

        def widths(self, request_ids: Any, *_: Any) -> list[int]:
            return [2 // (failing != "widths")] * len(request_ids)

        def observe(self, step: Any) -> None:
            assert failing != "observe"

        def forget(self, request_id: Any) -> None:
            assert failing != "forget"

    widths = BatchWidths(Failing(), [1, 2, 8])
    for _ in range(3):
        width = widths.choose(["a"])
        widths.verified(StepResult(width, 1, [("a", 0)], 1.0))
        widths.finished("b")
    assert widths.choose(["a"]) == 8
    assert caplog.text.count("the choice of widths failed") == 1


def test_widths_are_few_and_end_with_the_block() -> None:
    assert narrow_widths(8) == [1, 2, 4]
    assert narrow_widths(10) == [1, 2, 4, 8]
    assert asked_width({}) is None
    assert asked_width({WIDTH_VARIABLE: "auto"}) == AUTO
    assert asked_width({WIDTH_VARIABLE: "4"}) == 4
    with pytest.raises(UserError, match="neither a number of slots nor auto"):
        asked_width({WIDTH_VARIABLE: "wide"})
    with pytest.raises(UserError, match="no cost table"):
        given_cost({COST_TABLE: "/nowhere.json"})


def test_where_a_width_was_left_out_the_next_wider_one_is_taken() -> None:
    widths = BatchWidths(FixedWidth(2), [1, 4, 8])
    assert widths.choose(["a"]) == 4
