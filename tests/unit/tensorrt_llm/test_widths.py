"""`width: auto` on TensorRT-LLM: a table of draft lengths by batch size, or a line that says what it lacks."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_serve.deployment import COST_TABLE, SURVIVAL, Deployment
from dflash_serve.speculation.costs import CostModel
from dflash_tensorrt_llm import TensorRTLLMBackend
from dflash_tensorrt_llm.launch_plan import draft_lengths, starving_from
from dflash_tensorrt_llm.releases import Release
from dflash_tensorrt_llm.upstream import llm_args
from tests.support.tiny import tiny_drafter_config
from tests.unit.tensorrt_llm.conftest import tiny_deployment

NEW, BEFORE = Release.parse("1.4"), Release.parse("1.3.0rc21")
MEASURED = (0.8, 0.6, 0.45, 0.3, 0.2, 0.1, 0.05)
FLAT_THEN_STEEP = CostModel(target={1: 1.0, 16: 1.0, 512: 32.0}, draft={1: 0.05, 64: 0.1})


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return tiny_deployment(tmp_path, tiny_drafter_config())


@pytest.fixture
def costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cost.json").write_text(FLAT_THEN_STEEP.model_dump_json())
    monkeypatch.setenv(COST_TABLE, str(tmp_path / "cost.json"))
    monkeypatch.setenv(SURVIVAL, ",".join(map(str, MEASURED)))


def asking(deployment: Deployment, width: object, **more: Any) -> Deployment:
    fields = {**deployment.model_dump(exclude_unset=True), "speculation": {"width": width}, **more}
    return Deployment.model_validate(fields)


def speculative(deployment: Deployment, release: Release = NEW) -> dict[str, Any]:
    backend = TensorRTLLMBackend(release)
    assert backend.check(deployment) == []
    written = yaml.safe_load(backend.yaml(TensorRTLLMBackend(release).resolve(deployment), Path("/prepared")))
    found: dict[str, Any] = written["speculative_config"]
    return found


def as_upstream_reads(schedule: Mapping[int, int], batch: int) -> int:
    """`get_draft_len_for_batch_size` (speculative/utils.py): up to a key; above the largest, nothing."""
    sizes = sorted(schedule)
    at = bisect_left(sizes, batch)
    return schedule[sizes[at]] if at < len(sizes) else 0


@pytest.mark.usefixtures("costs")
def test_auto_is_a_table_by_batch_size_in_which_each_width_is_what_pays(deployment: Deployment) -> None:
    block = TensorRTLLMBackend(NEW).resolve(deployment).block_size
    found = speculative(asking(deployment, "auto", limits={"max_model_len": 128, "max_batch_size": 64}))
    schedule = found["draft_len_schedule"]
    assert found["max_draft_len"] == as_upstream_reads(schedule, 1) == block - 1
    for batch in range(1, 65):

        def rate(width: int, n: int = batch) -> float:
            return n * (1 + sum(MEASURED[: width - 1])) / FLAT_THEN_STEEP.step_seconds([width] * n)

        width = as_upstream_reads(schedule, batch) + 1
        assert rate(width) == pytest.approx(max(map(rate, range(2, block + 1))))
    assert as_upstream_reads(schedule, 64) < block - 1, "it narrows as the batch grows"


@pytest.mark.usefixtures("costs")
def test_left_to_its_default_it_is_the_same_table_and_the_dry_run_says_so(deployment: Deployment) -> None:
    assert speculative(deployment) == speculative(asking(deployment, "auto"))
    told = TensorRTLLMBackend(NEW).preview(deployment, Path("/prepared"))
    (chosen,) = (choice for choice in told.choices if choice.key == "speculation.width")
    assert chosen.value.startswith("auto (")
    assert "slots up to 256 requests" in chosen.value
    assert any("the width follows how many requests run, and nothing else" in note for note in told.notes)


@pytest.mark.usefixtures("costs")
def test_a_number_and_the_users_own_table_come_before_ours(deployment: Deployment) -> None:
    assert "draft_len_schedule" not in speculative(asking(deployment, 3))
    block = TensorRTLLMBackend(NEW).resolve(deployment).block_size
    own = {"tensorrt-llm": {"speculative_config": {"draft_len_schedule": {4: block - 1, 256: 1}}}}
    found = speculative(asking(deployment, "auto", engine_args=own))
    assert found["draft_len_schedule"] == {4: block - 1, 256: 1}


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
    fields = {"max_draft_len": most, "speculative_model": "draft", "draft_len_schedule": schedule}
    llm_args({"max_batch_size": batch, "speculative_config": fields}, NEW)


@pytest.mark.parametrize(
    ("schedule", "batch", "expected"), [({4: 7, 8: 0}, 8, 5), ({4: 7}, 8, 5), ({4: 7, 8: 1}, 8, None), ({4: 0}, 4, 1)]
)
def test_a_table_that_stops_drafting_is_seen(schedule: dict[int, int], batch: int, expected: int | None) -> None:
    assert starving_from(schedule, batch) == expected
    nothing = [size for size in range(1, batch + 1) if as_upstream_reads(schedule, size) == 0]
    assert next(iter(nothing), None) == expected


def test_the_users_own_table_that_starves_the_drafter_is_a_note(deployment: Deployment) -> None:
    block = TensorRTLLMBackend(NEW).resolve(deployment).block_size
    own = {"tensorrt-llm": {"speculative_config": {"draft_len_schedule": {4: block - 1, 32: 1}}}}
    notes = TensorRTLLMBackend(NEW).preview(asking(deployment, "auto", engine_args=own), Path("/prepared")).notes
    assert any(note.startswith("from 33 requests on nothing is drafted") for note in notes)


def test_without_costs_auto_is_an_error_with_its_ways_out_and_by_default_a_note(deployment: Deployment) -> None:
    backend = TensorRTLLMBackend(NEW)
    (problem,) = backend.check(asking(deployment, "auto"))
    assert problem.where == "speculation.width"
    assert "(or off), or give DFLASH_SERVE_COST_TABLE and DFLASH_SERVE_SURVIVAL" in problem.do
    assert backend.check(deployment) == []
    assert any("slots in every step, whatever that costs" in note for note in backend.preview(deployment, Path()).notes)


@pytest.mark.usefixtures("costs")
def test_a_release_that_would_ignore_the_table_is_not_given_one(deployment: Deployment) -> None:
    assert "draft_len_schedule" not in speculative(deployment, BEFORE)
    (problem,) = TensorRTLLMBackend(BEFORE).check(asking(deployment, "auto"))
    assert "install TensorRT-LLM 1.3.0rc22 or later" in problem.do
    own = {"tensorrt-llm": {"speculative_config": {"draft_len_schedule": {256: 3}}}}
    (problem,) = TensorRTLLMBackend(BEFORE).check(asking(deployment, 4, engine_args=own))
    assert "1.3.0rc21 ignores draft_len_schedule" in problem.what


def test_the_survival_that_a_drafter_was_trained_to_needs_no_other(
    deployment: Deployment, costs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SURVIVAL)
    assert "draft_len_schedule" not in speculative(deployment)
    assert deployment.drafter is not None
    text = json.dumps({"validation": {"survival": MEASURED}})
    (Path(deployment.drafter.model) / "provenance.json").write_text(text)
    assert "draft_len_schedule" in speculative(deployment)


@pytest.mark.parametrize(
    ("name", "text", "said"), [(COST_TABLE, "/nowhere.json", "no cost table"), (SURVIVAL, "0.2,0.4", "is no survival")]
)
@pytest.mark.usefixtures("costs")
def test_costs_that_cannot_be_read_are_a_problem(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, name: str, text: str, said: str
) -> None:
    monkeypatch.setenv(name, text)
    (problem,) = TensorRTLLMBackend(NEW).check(deployment)
    assert said in problem.what
