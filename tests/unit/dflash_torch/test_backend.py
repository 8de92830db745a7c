"""The embedded backend refuses unsupported fields, and models that do not fit, before it loads anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.adapter.last_run import KeptWidth
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.variables import COST_TABLE, SURVIVAL
from dflash_serve.errors import UserError
from dflash_serve.speculation.costs import CostModel
from dflash_torch import backend


def deployment(folders: tuple[Path, Path], **sections: Any) -> Deployment:
    given = {"target": {"model": str(folders[0])}, "drafter": {"model": str(folders[1])}}
    return Deployment.model_validate({**given, **sections})


def test_what_it_can_do_has_no_problems(folders: tuple[Path, Path]) -> None:
    limits = {"max_batch_size": 4, "max_model_len": 128, "max_queued_requests": 3}
    assert backend.launch(deployment(folders, limits=limits, speculation={"block_size": 3, "width": 2})).problems == []


IGNORED: list[tuple[str, dict[str, Any]]] = [
    ("parallel.tensor", {"parallel": {"tensor": 2}}),
    ("parallel.nodes", {"parallel": {"nodes": 2}}),
    ("parallel.attention_data", {"parallel": {"attention_data": True}}),
    ("speculation.draft_window", {"speculation": {"draft_window": 512}}),
    ("kv_cache.dtype", {"kv_cache": {"dtype": "fp8"}}),
    ("kv_cache.memory_fraction", {"kv_cache": {"memory_fraction": 0.5}}),
    ("hardware.count", {"hardware": {"count": 8}}),
    ("role", {"role": "decode"}),
    ("target.quantization", {"target": {"quantization": "fp8"}}),
    ("limits.max_model_len", {"limits": {"max_model_len": 10**7}}),  # more than the target has positions
]


@pytest.mark.parametrize(("field", "sections"), IGNORED)
def test_a_setting_it_would_ignore_is_a_problem(
    folders: tuple[Path, Path], field: str, sections: dict[str, Any]
) -> None:
    if "target" in sections:
        sections = {"target": {"model": str(folders[0]), **sections["target"]}}
    assert [problem.where for problem in backend.launch(deployment(folders, **sections)).problems] == [field]


@pytest.mark.parametrize(
    ("engine", "sections"),
    [
        ("--backend sglang", {"speculation": {"draft_window": 512}}),
        ("--backend sglang", {"role": "prefill"}),
        ("--backend tensorrt-llm", {"parallel": {"context": 2}}),
        ("another --backend", {"parallel": {"tensor": 2}}),
    ],
)
def test_a_setting_it_lacks_is_advised_on_an_engine_that_has_it(
    folders: tuple[Path, Path], engine: str, sections: dict[str, Any]
) -> None:
    (problem,) = backend.launch(deployment(folders, **sections)).problems
    assert problem.do == f"leave it out, or serve with {engine}"


@pytest.mark.parametrize(("variable", "value"), [(COST_TABLE, "/nowhere.json"), (SURVIVAL, "1.5")])
def test_measurements_that_auto_cannot_read_are_a_problem(
    folders: tuple[Path, Path], variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    (problem,) = backend.launch(deployment(folders)).problems
    assert value in str(problem)
    assert backend.launch(deployment(folders, speculation={"width": "off"})).problems == []


def test_a_gpu_that_is_not_there_is_refused(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="b200"):
        backend.engine(deployment(folders, hardware={"gpu": "b200"}))


def test_more_memory_than_there_is_is_one_clear_line(folders: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match=r"does not fit into memory.*lower limits\.max_batch_size"):
        backend.engine(deployment(folders, limits={"max_batch_size": 10**9}, speculation={"width": "off"}))


def test_a_cost_table_that_is_given_is_used(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = CostModel(target={1: 1.0, 64: 64.0}, draft={1: 1.0, 8: 8.0})
    (tmp_path / "cost.json").write_text(cost.model_dump_json())
    monkeypatch.setenv(COST_TABLE, str(tmp_path / "cost.json"))
    monkeypatch.setattr("dflash_torch.engine.cost_of", None)  # measures
    engine = backend.engine(deployment(folders, limits={"max_batch_size": 2}))
    assert isinstance(engine.scheduler.policy, KeptWidth)


def test_a_family_it_does_not_run_is_refused_before_anything_is_fetched(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    config = json.loads((folders[0] / "config.json").read_text()) | {"model_type": "qwen3_moe"}
    (tmp_path / "config.json").write_text(json.dumps(config))  # and no weights
    with pytest.raises(UserError, match=r"qwen3_moe.*other backends"):
        _ = backend.launch(deployment((tmp_path, folders[1]))).problems


def test_a_misspelt_setting_of_the_http_server_is_named_never_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_torch.server.__main__ import _settings

    monkeypatch.setenv("DFLASH_SERVE_HTTP_SERVICE_HOST", "10.0.0.1")  # Kubernetes' own, of a service of that name
    monkeypatch.setenv("DFLASH_SERVE_HTTP_DRAIN_SECONDS", "7")
    assert _settings().drain_seconds == 7
    monkeypatch.setenv("DFLASH_SERVE_HTTP_DRAIN_SECOND", "7")
    with pytest.raises(UserError, match=r"DRAIN_SECOND: names no setting; did you mean .*_DRAIN_SECONDS\?"):
        _settings()
