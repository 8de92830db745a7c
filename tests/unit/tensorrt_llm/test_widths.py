"""`width: auto` on TensorRT-LLM: a table of draft lengths by batch size, or a line that says what it lacks."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.variables import COST_TABLE, SURVIVAL
from dflash_serve.speculation.costs import CostModel
from dflash_tensorrt_llm.settings import draft_lengths, starving_from
from dflash_tensorrt_llm.upstream import LlmArgs
from tests.support.tiny import tiny_drafter_config
from tests.unit.tensorrt_llm.conftest import backend, changed, configuration, tiny_deployment

MEASURED = (0.8, 0.6, 0.45, 0.3, 0.2, 0.1, 0.05)
FLAT_THEN_STEEP = CostModel(target={1: 1.0, 16: 1.0, 512: 32.0}, draft={1: 0.05, 64: 0.1})
BLOCK = tiny_drafter_config().block_size


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return tiny_deployment(tmp_path, tiny_drafter_config())


@pytest.fixture
def costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cost.json").write_text(FLAT_THEN_STEEP.model_dump_json())
    monkeypatch.setenv(COST_TABLE, str(tmp_path / "cost.json"))
    monkeypatch.setenv(SURVIVAL, ",".join(map(str, MEASURED)))


def asking(deployment: Deployment, width: object, **more: Any) -> Deployment:
    return changed(deployment, speculation={"width": width}, **more)


def speculative(deployment: Deployment) -> dict[str, Any]:
    found: dict[str, Any] = configuration(deployment)["speculative_config"]
    return found


def users_table(schedule: Mapping[int, int]) -> dict[str, Any]:
    return {"tensorrt-llm": {"speculative_config": {"draft_len_schedule": schedule}}}


def as_upstream_reads(schedule: Mapping[int, int], batch: int) -> int:
    """`get_draft_len_for_batch_size` (speculative/utils.py): up to a key; above the largest, nothing."""
    sizes = sorted(schedule)
    at = bisect_left(sizes, batch)
    return schedule[sizes[at]] if at < len(sizes) else 0


@pytest.mark.usefixtures("costs")
def test_auto_is_a_table_by_batch_size_in_which_each_width_is_what_pays(deployment: Deployment) -> None:
    found = speculative(asking(deployment, "auto", limits={"max_model_len": 128, "max_batch_size": 64}))
    schedule = found["draft_len_schedule"]
    assert found["max_draft_len"] == as_upstream_reads(schedule, 1) == BLOCK - 1
    for batch in range(1, 65):

        def rate(width: int, n: int = batch) -> float:
            return n * (1 + sum(MEASURED[: width - 1])) / FLAT_THEN_STEEP.step_seconds([width] * n)

        width = as_upstream_reads(schedule, batch) + 1
        assert rate(width) == pytest.approx(max(map(rate, range(2, BLOCK + 1))))
    assert as_upstream_reads(schedule, 64) < BLOCK - 1, "it narrows as the batch grows"


@pytest.mark.usefixtures("costs")
def test_by_default_it_is_the_same_table_and_the_dry_run_says_so(deployment: Deployment) -> None:
    assert speculative(deployment) == speculative(asking(deployment, "auto"))
    told = backend().launch(deployment)
    (chosen,) = (choice for choice in told.choices if choice.key == "speculation.width")
    assert chosen.value.startswith("auto (")
    assert "slots up to 256 requests" in chosen.value
    assert any("the width follows how many requests run, and nothing else" in note for note in told.notes)


@pytest.mark.usefixtures("costs")
def test_a_number_and_the_users_own_table_come_before_ours(deployment: Deployment) -> None:
    assert "draft_len_schedule" not in speculative(asking(deployment, 3))
    own = {4: BLOCK - 1, 256: 1}
    assert speculative(asking(deployment, "auto", engine_args=users_table(own)))["draft_len_schedule"] == own


curves = st.dictionaries(st.integers(1, 2048), st.floats(1e-3, 10), min_size=1, max_size=6)
survivals = st.lists(st.floats(0, 1), min_size=1, max_size=15).map(lambda found: sorted(found, reverse=True))


@settings(deadline=None)
@given(st.builds(CostModel, target=curves, draft=curves), survivals, st.integers(2, 16), st.integers(1, 80))
def test_any_costs_give_a_table_that_upstream_takes_and_that_never_starves_the_drafter(
    cost: CostModel, survival: list[float], block: int, batch: int
) -> None:
    schedule = draft_lengths(cost, survival, block, batch)
    assert starving_from(schedule, batch) is None
    assert all(as_upstream_reads(schedule, size) >= 1 for size in range(1, batch + 1))
    most = schedule[min(schedule)]
    fields = {
        "decoding_type": "DFlash",
        "max_draft_len": most,
        "speculative_model": "draft",
        "draft_len_schedule": schedule,
    }
    LlmArgs.model_validate({"max_batch_size": batch, "speculative_config": fields})


@pytest.mark.parametrize(
    ("schedule", "batch", "expected"), [({4: 7, 8: 0}, 8, 5), ({4: 7}, 8, 5), ({4: 7, 8: 1}, 8, None), ({4: 0}, 4, 1)]
)
def test_a_table_that_stops_drafting_is_seen(schedule: dict[int, int], batch: int, expected: int | None) -> None:
    assert starving_from(schedule, batch) == expected
    nothing = [size for size in range(1, batch + 1) if as_upstream_reads(schedule, size) == 0]
    assert next(iter(nothing), None) == expected


def test_the_users_own_table_that_starves_the_drafter_is_a_note(deployment: Deployment) -> None:
    asked = asking(deployment, "auto", engine_args=users_table({4: BLOCK - 1, 32: 1}))
    notes = backend().launch(asked).notes
    assert any(note.startswith("from 33 requests on nothing is drafted") for note in notes)


def test_without_costs_auto_is_the_whole_block_and_a_note_whether_it_is_written_or_not(deployment: Deployment) -> None:
    written = asking(deployment, "auto")
    assert backend().launch(written).problems == backend().launch(deployment).problems == []
    assert speculative(written) == speculative(deployment)
    notes = backend().launch(written).notes
    assert notes == backend().launch(deployment).notes
    (note,) = (note for note in notes if "slots in every step, whatever that costs" in note)
    assert "give DFLASH_SERVE_COST_TABLE and DFLASH_SERVE_SURVIVAL" in note


@pytest.mark.usefixtures("costs")
def test_the_survival_that_a_drafter_was_trained_to_needs_no_other(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SURVIVAL)
    assert "draft_len_schedule" not in speculative(deployment)
    assert deployment.drafter is not None
    text = json.dumps({"validation": {"survival": MEASURED}})
    (Path(deployment.drafter.model) / "provenance.json").write_text(text)
    assert "draft_len_schedule" in speculative(deployment)


@pytest.mark.usefixtures("costs")
@pytest.mark.parametrize(
    ("name", "text", "said"), [(COST_TABLE, "/nowhere.json", "no cost table"), (SURVIVAL, "0.2,0.4", "is no survival")]
)
def test_costs_that_cannot_be_read_are_a_problem(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, name: str, text: str, said: str
) -> None:
    monkeypatch.setenv(name, text)
    (problem,) = backend().launch(deployment).problems
    assert said in problem.what
