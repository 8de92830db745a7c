"""Which width the plug-in gives a batch, and which results it learns from; no SGLang needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_serve.errors import UserError
from dflash_serve.speculation.costs import CostModel
from dflash_serve.speculation.width import FixedWidth
from dflash_sglang.launch_plan import WIDTH_VARIABLE
from dflash_sglang.plugin.metrics import on_result
from dflash_sglang.plugin.widths import COST_TABLE, BatchWidths, allowed_widths, asked_width, given_cost, make_policy


def test_only_what_sglang_counts_is_counted() -> None:
    def request(rid: str, finished: bool = False, retracted: bool = False) -> Any:
        return SimpleNamespace(rid=rid, finished=lambda: finished, is_retracted=retracted)

    heard: list[tuple[int, Any]] = []
    listener = SimpleNamespace(verified=lambda width, accepted: heard.append((width, list(accepted))))
    batch = SimpleNamespace(reqs=[request("a"), request("b", finished=True), request("c", retracted=True)])
    result = SimpleNamespace(speculative_num_draft_tokens=4, num_correct_drafts_per_req_cpu=[2, 3, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_sglang.plugin.metrics._LISTENERS", [listener])
        assert on_result(lambda *_: "settled", None, result, batch) == "settled"
    assert heard == [(4, [("a", 2)])]


def test_a_narrow_step_costs_what_its_batch_says() -> None:
    flat_then_steep = CostModel(target={1: 1.0, 8: 1.0, 128: 16.0}, draft={1: 0.1, 16: 0.1})
    widths = BatchWidths(make_policy(8, flat_then_steep))
    for _ in range(40):  # a drafter that is right three times in a row
        alone = widths.choose(["a"])
        widths.verified(alone, [("a", min(3, alone - 1))])
    crowd = [str(i) for i in range(16)]
    narrow = [widths.choose(crowd) for _ in range(20)]
    assert alone >= 4
    assert sorted(narrow)[10] < alone


def test_requests_that_have_ended_are_forgotten() -> None:
    told: list[object] = []
    policy = FixedWidth(4)
    widths = BatchWidths(policy)
    widths.choose(["a"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FixedWidth, "observe", lambda _, step: told.extend(step.request_ids))
        widths.finished("a")
        widths.verified(4, [("a", 1)])
    assert told == []


def test_widths_are_few_and_end_with_the_block() -> None:
    assert allowed_widths(8) == [2, 4, 8]
    assert allowed_widths(10) == [2, 4, 8, 10]
    assert asked_width({}) is None
    assert asked_width({WIDTH_VARIABLE: "4"}) == 4
    with pytest.raises(UserError, match="neither a number of slots nor auto"):
        asked_width({WIDTH_VARIABLE: "wide"})
    with pytest.raises(UserError, match="no cost table"):
        given_cost({COST_TABLE: "/nowhere.json"})
