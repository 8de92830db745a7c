"""Every narrow width gets attention and CUDA graphs of its own. Nothing is captured here: SGLang's side is held to its
signature, and ours to what it asks SGLang for.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

BLOCK, NARROW = 8, [1, 2, 4]


class Settings:
    """As much of SGLang's settings of speculation."""

    speculative_num_draft_tokens = BLOCK

    @contextmanager
    def override(self, speculative_num_draft_tokens: int) -> Iterator[None]:
        self.speculative_num_draft_tokens = speculative_num_draft_tokens
        yield
        self.speculative_num_draft_tokens = BLOCK


class Runner:
    """As much of SGLang's model runner as building a width's state looks at."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.init_new_workspace = settings, False
        self.attn_backend, self.decode_cuda_graph_runner = "whole blocks' attention", "whole blocks' graphs"
        self.captured: list[dict[str, Any]] = []

    def _get_attention_backend(self, init_new_workspace: bool) -> str:
        assert init_new_workspace
        self.init_new_workspace = True
        return f"attention of width {self.settings.speculative_num_draft_tokens}"

    def _decode_cuda_graph_runner_cls(self) -> Any:
        def capture(runner: Any, **how: Any) -> str:
            assert runner is self
            self.captured.append(how)
            return f"graphs of width {how['speculative_num_draft_tokens']}"

        return capture


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose GPU has `free` GB."""
    from dflash_sglang.plugin import narrow_step

    settings = Settings()
    fake = SimpleNamespace(model_runner=Runner(settings), block_size=BLOCK, device="cuda", gpu_id=0, free=80.0)
    graph = SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend="full")))
    monkeypatch.setattr(narrow_step, "current_platform", SimpleNamespace(is_out_of_tree=lambda: False))
    monkeypatch.setattr(narrow_step, "get_exec", lambda: SimpleNamespace(graph=graph))
    monkeypatch.setattr(narrow_step, "get_available_gpu_memory", lambda *_: fake.free)
    monkeypatch.setattr(narrow_step, "get_spec", lambda: settings)
    return fake


def test_each_narrow_width_is_captured_once_for_itself(worker: Any) -> None:
    from dflash_sglang.plugin.narrow_step import build_states

    states = build_states(worker, NARROW)
    assert [how["speculative_num_draft_tokens"] for how in worker.model_runner.captured] == NARROW
    for width, state in states.items():
        assert (state.attention, state.graphs) == (f"attention of width {width}", f"graphs of width {width}")
        assert worker.model_runner.captured[NARROW.index(width)]["attn_backend"] == state.attention
    assert worker.model_runner.init_new_workspace is False


def test_where_memory_is_short_a_width_runs_without_graphs(worker: Any) -> None:
    from dflash_sglang.plugin.narrow_step import build_states

    worker.free = 1.0
    assert {state.graphs for state in build_states(worker, NARROW).values()} == {None}


def test_a_state_is_lent_for_one_verification_only(worker: Any) -> None:
    from dflash_sglang.plugin.narrow_step import build_states, verifying

    runner, states = worker.model_runner, build_states(worker, NARROW)
    with verifying(runner, states[2]):
        assert (runner.attn_backend, runner.decode_cuda_graph_runner) == ("attention of width 2", "graphs of width 2")
    assert (runner.attn_backend, runner.decode_cuda_graph_runner) == ("whole blocks' attention", "whole blocks' graphs")


def test_sglangs_graph_runner_takes_what_we_pass() -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    taken = inspect.signature(DecodeCudaGraphRunner.__init__).parameters
    assert {"model_runner", "attn_backend", "speculative_num_steps", "speculative_num_draft_tokens"} <= taken.keys()
    plain = SimpleNamespace(spec_algorithm=SimpleNamespace(is_uno=lambda: False))
    assert ModelRunner._decode_cuda_graph_runner_cls(plain) is DecodeCudaGraphRunner
