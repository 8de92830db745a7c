"""The short way of vLLM's steps without drafts, against the methods of vLLM that it stands in for."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's class of runners with its own two methods noted instead of run, and ours before them."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from dflash_vllm.plugin.resting import spare_the_worker

    monkeypatch.setattr(GPUModelRunner, "_sample", lambda _, *told: ("sampled", *told))
    monkeypatch.setattr(GPUModelRunner, "propose_draft_token_ids", lambda _, *told: ("proposed", *told))
    spare_the_worker()
    ours = GPUModelRunner._sample
    spare_the_worker()
    assert GPUModelRunner._sample is ours
    found: Any = object.__new__(GPUModelRunner)
    found.uses_mrope, found.positions, found.rested = False, torch.arange(100, 110), []
    found.drafter = SimpleNamespace(model=SimpleNamespace(rest=lambda *rows: found.rested.append(rows)))
    return found


def propose(runner: Any, *, drafted: int = 0, verified: Any = (), features: Any = None, positions: Any = None) -> Any:
    """A step of two requests and three rows; vLLM's buffers are longer."""
    if positions is not None:
        runner.mrope_positions, runner.uses_mrope = SimpleNamespace(gpu=positions), True
    step = SimpleNamespace(
        total_num_scheduled_tokens=3,
        num_scheduled_tokens={"a": 1, "b": 2},
        num_spec_tokens_to_schedule=drafted,
        scheduled_spec_decode_tokens=verified,
    )
    attention = SimpleNamespace(slot_mapping=torch.arange(50, 60))
    return runner.propose_draft_token_ids(step, "tokens", "sampling", "hidden", "rows", features, None, attention, {})


def test_a_step_without_drafts_lays_its_context_by(runner: Any) -> None:
    layers = [torch.full((5, 2), 1.0), torch.full((5, 2), 2.0)]
    assert propose(runner, features=layers).shape == (2, 0)
    ((features, positions, slots),) = runner.rested
    assert features.tolist() == [[1.0, 1.0, 2.0, 2.0]] * 3
    assert (positions.tolist(), slots.tolist()) == ([100, 101, 102], [50, 51, 52])


@pytest.mark.parametrize(
    "step",
    [
        {"drafted": 3},
        {"verified": {"a": [7]}},
        {"features": None},
        {"positions": torch.zeros(3, 9, dtype=torch.long)},
    ],
)
def test_every_other_step_is_vllms_own(runner: Any, step: dict[str, Any]) -> None:
    found = propose(runner, **{"features": [torch.zeros(5, 2)], **step})
    assert found[0] == "proposed"
    assert found[2:6] == ("tokens", "sampling", "hidden", "rows")
    assert runner.rested == []


@pytest.mark.parametrize(("drafts", "kept"), [([0, 0], False), ([0, 2], True)])
def test_only_drafts_are_sampled_by_rejection(runner: Any, drafts: list[int], kept: bool) -> None:
    metadata = SimpleNamespace(num_draft_tokens=drafts)
    assert runner._sample("logits", metadata) == ("sampled", "logits", metadata if kept else None)
    assert runner._sample("logits", None) == ("sampled", "logits", None)


@pytest.mark.parametrize(("told", "asked"), [({"drafts_nothing": True}, 0), ({"drafts_nothing": False}, 1), ({}, 1)])
def test_drafts_are_asked_for_where_there_are_some(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, bool], asked: int
) -> None:
    from vllm.v1.engine.core import EngineCore

    from dflash_vllm.plugin.resting import spare_the_scheduler

    calls: list[bool] = []
    monkeypatch.setattr(EngineCore, "post_step", lambda _, executed: calls.append(executed))
    spare_the_scheduler()
    ours = EngineCore.post_step
    spare_the_scheduler()
    assert EngineCore.post_step is ours
    engine: Any = object.__new__(EngineCore)
    engine.scheduler = SimpleNamespace(**told)
    engine.post_step(True)
    assert calls == [True] * asked


def test_vllms_methods_are_as_we_take_them() -> None:
    """Order of arguments, and what is done around them. Upstream: vllm 0.32.0."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    told = list(inspect.signature(GPUModelRunner.propose_draft_token_ids).parameters)[1:]
    assert told == [
        *("scheduler_output", "sampled_token_ids", "sampling_metadata", "hidden_states", "sample_hidden_states"),
        *("aux_hidden_states", "spec_decode_metadata", "common_attn_metadata", "slot_mappings"),
    ]
    assert list(inspect.signature(GPUModelRunner._sample).parameters)[1:] == ["logits", "spec_decode_metadata"]
    assert list(inspect.signature(EngineCore.post_step).parameters)[1:] == ["model_executed"]
    sampled = inspect.getsource(GPUModelRunner.sample_tokens)
    assert "self._sample(logits, spec_decode_metadata)" in sampled
    assert "self._draft_probs = None" in sampled  # so nothing of the last proposal is left
    assert "if spec_decode_metadata is None:\n            return self.sampler(" in inspect.getsource(
        GPUModelRunner._sample
    )
    assert "bonus_logits = logits[bonus_logits_indices]" in inspect.getsource(RejectionSampler.forward)
    assert "request.spec_token_ids = []" in inspect.getsource(Scheduler.schedule)  # no draft is verified twice
