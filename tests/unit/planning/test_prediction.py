"""Composition: what a step costs becomes tokens/s, and our own policy chooses the width."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_serve.deployment.gpus import GPUS
from dflash_serve.deployment.variables import COST_TABLE, given_cost
from dflash_serve.errors import UserError
from dflash_serve.planning.acceptance import from_length
from dflash_serve.planning.prediction import Load, Predictor, constants_of, known_constants
from dflash_serve.planning.step_times import Roofline, Split
from tests.support.planned import planned_pair

WIDTHS = [2, 4, 6, 8, 12, 16]


def predictor(folder: Path) -> Predictor:
    times = Roofline(planned_pair(folder), GPUS["h100"], Split())
    return Predictor(times, constants_of("sglang", "sglang-spec-v1"), Load(1024, 1024), 16)


def test_tokens_per_second_are_what_the_formula_says(tmp_path: Path) -> None:
    one = predictor(tmp_path)
    point = one.point("fixed 16", 8, 16, 6.5)
    step = one.step(8, 16) + one.prefill_share(8 * 6.5 / 1024)
    assert point.interactivity == pytest.approx(6.5 / step.total * 1e3)
    assert point.throughput == pytest.approx(8 * point.interactivity)
    own = one.constants
    assert one.step(8, 16).constants == pytest.approx(own.speculative_step + 8 * own.speculative_request)
    assert one.step(8, 1).constants == pytest.approx(own.plain_step + 8 * own.plain_request)


def test_prefills_take_more_the_shorter_the_answers(tmp_path: Path) -> None:
    one = predictor(tmp_path)
    assert 0 < one.prefill_share(0.1).total < one.prefill_share(1.0).total
    assert one.prefill_share(1e-6).total == pytest.approx(1e-6 * one.prefill(1).total, rel=0.01)


def test_auto_takes_narrower_widths_at_larger_batches_and_loses_to_none(tmp_path: Path) -> None:
    one, acceptance = predictor(tmp_path), from_length(4.24, 16, "MT-Bench")
    chosen = {batch: one.auto(batch, WIDTHS, acceptance) for batch in (1, 32, 256)}
    assert chosen[1] >= chosen[32] >= chosen[256]
    assert chosen[1] > chosen[256]
    for batch, width in chosen.items():
        rates = {w: acceptance.length(w) / one.step(batch, w).total for w in (1, *WIDTHS)}
        assert rates[width] >= 0.97 * max(rates.values()), f"batch {batch}"


def test_the_cost_table_is_one_that_servers_start_from(tmp_path: Path) -> None:
    one = predictor(tmp_path)
    path = tmp_path / "costs.json"
    path.write_text(one.cost_model(64, WIDTHS).model_dump_json())
    cost = given_cost({COST_TABLE: str(path)})
    assert cost is not None
    for batch, width in ((64, 1), (64, 16), (64, 4)):
        told = cost.step_seconds([width] * batch, context_tokens=batch * one.load.context)
        assert 1e3 * told == pytest.approx(one.step(batch, width).total, rel=0.03)


def test_constants_are_checked_and_say_where_they_are_from(tmp_path: Path) -> None:
    assert all(each.source for each in known_constants())
    path = tmp_path / "mine.json"
    path.write_text(constants_of("vllm", None).model_dump_json())
    assert constants_of("vllm", str(path)) == constants_of("vllm", None)
    path.write_text('{"name": "x"}')
    with pytest.raises(UserError, match="no constants"):
        constants_of("vllm", str(path))
    with pytest.raises(UserError, match="did you mean sglang-spec-v1"):
        constants_of("sglang", "sglang-spec-v1x")
    with pytest.raises(UserError, match="nothing is known of how long torch takes"):
        constants_of("torch", None)
