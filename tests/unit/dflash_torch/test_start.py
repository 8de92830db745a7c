"""The start of an engine: measurements, their cache, and the choices that depend on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_serve.deployment import Deployment, load_deployment
from dflash_serve.models.compiled import operators
from dflash_serve.models.compiled.build import find_compiler, load_kernels
from dflash_serve.speculation.costs import CostModel
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.policy import FixedWidth
from dflash_serve.speculation.width import AutoWidth
from dflash_torch import calibration, model_runner
from dflash_torch.calibration import Calibration
from dflash_torch.engine import start_engine
from dflash_torch.launch import with_operators
from tests.support.embedded import answers

Folders = tuple[Path, Path]
COST = CostModel(target={1: 1.0, 16: 1.2}, draft={1: 0.1, 2: 0.2})


def deployment(folders: Folders, *, width: int | str = "auto", **limits: int) -> Deployment:
    flags: dict[str, Any] = {
        "target": {"model": str(folders[0])},
        "drafter": {"model": str(folders[1])},
        "speculation": {"width": width},
        "limits": {"max_batch_size": 2, **limits},
    }
    return load_deployment(flags=flags)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[object, ...]]:
    """What was measured; nothing is."""
    calls: list[tuple[object, ...]] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def measure(*given: object) -> Calibration:
        calls.append(given)
        return Calibration(cost=COST, spread=0.01, measured="today", machine="this", versions={})

    monkeypatch.setattr(calibration, "measure", measure)
    return calls


def test_costs_are_measured_once_and_kept(folders: Folders, measured: list[tuple[object, ...]]) -> None:
    for _ in range(2):
        policy = start_engine(deployment(folders)).scheduler.policy
        assert isinstance(policy, AutoWidth)
        assert policy.times.measured == COST
    assert len(measured) == 1


def test_where_passes_are_padded_all_is_captured_ahead_and_a_step_has_one_width(
    folders: Folders, measured: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = start_engine(deployment(folders)).scheduler
    assert isinstance(scheduler.policy, AutoWidth)
    assert (scheduler.policy.allowed_widths, scheduler.target_runner.captured) == (None, {})
    monkeypatch.setattr(model_runner, "_prepared", lambda cache, static: True)  # as on a GPU
    scheduler = start_engine(deployment(folders)).scheduler
    assert isinstance(scheduler.policy, AutoWidth)
    assert scheduler.policy.allowed_widths == (1, 2, 4)
    assert {shape.width for shape, _ in scheduler.target_runner.captured} == {1, 2, 4}


def test_costs_of_other_kernels_are_measured_again(
    folders: Folders, measured: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after another compiler: a machine that multiplies faster now must not draft by what it took before."""
    start_engine(deployment(folders))
    start_engine(deployment(folders).model_copy(update={"engine_args": {"torch": {"operators": "plain"}}}))
    before = len(measured)
    monkeypatch.setattr(operators, "kernels_id", lambda: "others")
    start_engine(deployment(folders).model_copy(update={"engine_args": {"torch": {"operators": "plain"}}}))
    assert len(measured) == before
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    start_engine(deployment(folders))
    assert len(measured) == before + 1


def test_a_cache_that_cannot_be_written_costs_a_measurement_and_no_more(
    folders: Folders, measured: list[tuple[object, ...]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "dflash-serve").mkdir()
    (tmp_path / "dflash-serve" / "cost").write_text("in the way")
    start_engine(deployment(folders))
    start_engine(deployment(folders))
    assert len(measured) == 2
    assert "measured again next time" in caplog.text


@pytest.mark.parametrize(("width", "expected"), [(3, FixedWidth(3)), ("off", FixedWidth(1)), (1, FixedWidth(1))])
def test_a_given_width_is_not_measured(
    folders: Folders, measured: list[tuple[object, ...]], width: int | str, expected: FixedWidth
) -> None:
    assert start_engine(deployment(folders, width=width)).scheduler.policy == expected
    assert measured == []


def test_costs_are_measured_where_the_model_is_shorter_than_the_measurement(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = start_engine(deployment(folders, max_model_len=32))
    params = SamplingParams(temperature=0, ignore_eos=True)
    assert len(answers(engine, [[5, 6, 7]], params)[0].token_ids) == 29


@pytest.mark.parametrize(("given", "name"), [({}, "compiled"), ({"torch": {"operators": "plain"}}, "plain")])
def test_small_operators_are_compiled_unless_the_deployment_says_otherwise(
    folders: Folders, given: dict[str, Any], name: str
) -> None:
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    load_kernels.cache_clear()  # a test before this one may have hidden the compiler
    found = deployment(folders, width="off").model_copy(update={"engine_args": given})
    assert start_engine(found).scheduler.target.operators.name == name


def test_compiled_operators_change_no_answer(folders: Folders) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    plainly = {"engine_args": {"torch": {"operators": "plain"}}}
    found = [
        [output.token_ids for output in answers(start_engine(one), ["the quick brown fox", "over"], params)]
        for width in ("off", 4)
        for one in (deployment(folders, width=width), deployment(folders, width=width).model_copy(update=plainly))
    ]
    assert found == found[:1] * 4


def test_what_the_servers_environment_says_of_operators_is_done(folders: Folders) -> None:
    given = deployment(folders, width="off")
    assert with_operators(given, "auto") is given
    assert start_engine(with_operators(given, "plain")).scheduler.target.operators.name == "plain"
