"""Every narrow width gets attention and CUDA graphs of its own, as far as there is memory on every rank; whatever fails
on one rank fails on all. Nothing is captured here: ours is held to what it asks SGLang for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_sglang.plugin.ranks import Ranks

BLOCK, NARROW = 8, [1, 2, 4]
NEEDED = 1.5 + 4.0
"""GB: what the first width is taken to need, and what stays free for a prefill of 8192 tokens."""


class Settings:
    """As much of SGLang's settings of speculation."""

    speculative_num_draft_tokens = BLOCK

    @contextmanager
    def override(self, speculative_num_draft_tokens: int) -> Iterator[None]:
        self.speculative_num_draft_tokens = speculative_num_draft_tokens
        try:
            yield
        finally:
            self.speculative_num_draft_tokens = BLOCK


class Alone(Ranks):
    """One rank."""

    def __init__(self) -> None:
        pass

    def least(self, value: float) -> float:
        return value

    def all_agree(self, ok: bool) -> bool:
        return ok


class Runner:
    """As much of SGLang's model runner as building a width's state looks at; every state takes `takes` GB."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.init_new_workspace = settings, False
        self.attn_backend, self.decode_cuda_graph_runner = "whole blocks' attention", "whole blocks' graphs"
        self.captured: list[dict[str, Any]] = []
        self.free, self.takes, self.fails_at = 80.0, 0.5, -1
        self.model_config = SimpleNamespace(vocab_size=2**17)

    def _get_attention_backend(self, init_new_workspace: bool) -> str:
        assert init_new_workspace
        self.init_new_workspace = True
        if self.settings.speculative_num_draft_tokens == self.fails_at:
            raise MemoryError("out of memory")
        return f"attention of width {self.settings.speculative_num_draft_tokens}"

    def _decode_cuda_graph_runner_cls(self) -> Any:
        def capture(runner: Any, **how: Any) -> str:
            assert runner is self
            self.captured.append(how)
            self.free -= self.takes
            return f"graphs of width {how['speculative_num_draft_tokens']}"

        return capture


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    from dflash_sglang.plugin import states

    settings = Settings()
    fake = SimpleNamespace(model_runner=Runner(settings), block_size=BLOCK, device="cuda", gpu_id=0)
    fake._prewarm_batch_size = lambda block_size: fake.rehearsed
    fake.rehearsed = 1
    graph = SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend="full")))
    monkeypatch.setattr(states, "current_platform", SimpleNamespace(is_out_of_tree=lambda: False))
    monkeypatch.setattr(states, "get_exec", lambda: SimpleNamespace(graph=graph))
    monkeypatch.setattr(states, "get_schedule", lambda: SimpleNamespace(chunked_prefill_size=8192))
    monkeypatch.setattr(states, "get_available_gpu_memory", lambda *_: fake.model_runner.free)
    monkeypatch.setattr(states, "get_spec", lambda: settings)
    return fake


def test_each_narrow_width_is_captured_once_for_itself(worker: Any) -> None:
    from dflash_sglang.plugin.states import build_states

    states = build_states(worker, NARROW, Alone())
    captured = {how["speculative_num_draft_tokens"]: how for how in worker.model_runner.captured}
    assert sorted(captured) == sorted(states) == NARROW
    assert len(worker.model_runner.captured) == len(NARROW)
    for width, state in states.items():
        assert (state.attention, state.graphs) == (f"attention of width {width}", f"graphs of width {width}")
        assert captured[width]["attn_backend"] == state.attention
    assert worker.model_runner.init_new_workspace is False


@pytest.mark.parametrize(
    ("free", "takes", "built"),
    [
        (NEEDED - 0.1, 0.5, []),
        (NEEDED, 0.5, [1, 4, 2]),
        (NEEDED, 0.8, [1]),
        (NEEDED + 3, 3.0, [1]),
        (NEEDED + 4.5, 3.0, [1, 4]),
    ],
)
def test_widths_that_do_not_fit_are_left_out_the_least_useful_first(
    worker: Any, free: float, takes: float, built: list[int]
) -> None:
    """The second and later ones need what the largest so far has taken, beside what prefills need."""
    from dflash_sglang.plugin.states import build_states

    worker.model_runner.free, worker.model_runner.takes = free, takes
    assert list(build_states(worker, NARROW, Alone())) == built


def test_memory_is_left_for_the_rehearsal_of_sampling_that_follows(worker: Any) -> None:
    """Of 2048 requests here: six tensors of 16,384 rows and 131,072 columns in float32, which are 48 GB."""
    from dflash_sglang.plugin.states import build_states

    worker.rehearsed, worker.model_runner.free, worker.model_runner.takes = 2048, 1.5 + 48, 1.4
    assert list(build_states(worker, NARROW, Alone())) == [1]
    worker.model_runner.free = 1.5 + 47
    assert list(build_states(worker, NARROW, Alone())) == []


@pytest.mark.parametrize("width", NARROW)
def test_a_width_that_fails_leaves_whole_blocks(worker: Any, width: int) -> None:
    from dflash_sglang.plugin.ranks import RankError
    from dflash_sglang.plugin.states import build_states

    worker.model_runner.fails_at = width
    with pytest.raises(RankError, match=f"width {width}: out of memory"):
        build_states(worker, NARROW, Alone())
    assert worker.model_runner.init_new_workspace is False
    assert worker.model_runner.settings.speculative_num_draft_tokens == BLOCK


def test_ranks_decide_together(worker: Any) -> None:
    """This rank has memory and succeeds; another one is short of it, or fails."""
    from dflash_sglang.plugin.ranks import RankError
    from dflash_sglang.plugin.states import build_states

    class Short(Alone):
        def least(self, value: float) -> float:
            return min(value, NEEDED - 1)

    class Failing(Alone):
        def all_agree(self, ok: bool) -> bool:
            return False

    assert build_states(worker, NARROW, Short()) == {}
    with pytest.raises(RankError, match="width 1: another rank failed"):
        build_states(worker, NARROW, Failing())
    assert worker.model_runner.captured == []


def test_a_state_is_lent_for_one_verification_only(worker: Any) -> None:
    from dflash_sglang.plugin.states import build_states, verifying

    runner, states = worker.model_runner, build_states(worker, NARROW, Alone())
    with verifying(runner, states[2]):
        assert (runner.attn_backend, runner.decode_cuda_graph_runner) == ("attention of width 2", "graphs of width 2")
    assert (runner.attn_backend, runner.decode_cuda_graph_runner) == ("whole blocks' attention", "whole blocks' graphs")
