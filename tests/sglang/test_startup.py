"""Every narrow width gets attention and CUDA graphs of its own, as far as there is memory, and steps become costs.

Nothing is captured here: ours is held to what it asks SGLang for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.plugin.ranks import Ranks

BLOCK, NARROW = 8, [1, 2, 4]
ALONE = Ranks(SimpleNamespace(cpu_group=None, world_size=1, rank_in_group=0))
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


class Runner:
    """As much of SGLang's model runner as building a width's state looks at; every state takes `takes` GB."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.init_new_workspace = settings, False
        self.attn_backend, self.decode_cuda_graph_runner = "whole blocks' attention", "whole blocks' graphs"
        self.captured: dict[int, str] = {}
        self.free, self.takes, self.fails_at = 80.0, 0.5, -1
        self.model_config = SimpleNamespace(vocab_size=2**17)

    def _get_attention_backend(self, init_new_workspace: bool) -> str:
        assert init_new_workspace
        self.init_new_workspace = True
        if self.settings.speculative_num_draft_tokens == self.fails_at:
            raise MemoryError("out of memory")
        return f"attention of width {self.settings.speculative_num_draft_tokens}"

    def _decode_cuda_graph_runner_cls(self) -> Any:
        def capture(_: Any, attn_backend: str, speculative_num_steps: int, speculative_num_draft_tokens: int) -> str:
            assert speculative_num_draft_tokens not in self.captured
            self.captured[speculative_num_draft_tokens] = attn_backend
            self.free -= self.takes
            return f"graphs of width {speculative_num_draft_tokens}"

        return capture


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    from dflash_sglang.plugin import startup

    settings = Settings()
    fake = SimpleNamespace(model_runner=Runner(settings), block_size=BLOCK, device="cuda", gpu_id=0, rehearsed=1)
    fake._prewarm_batch_size = lambda block_size: fake.rehearsed
    graph = SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend="full")))
    monkeypatch.setattr(startup, "current_platform", SimpleNamespace(is_out_of_tree=lambda: False))
    monkeypatch.setattr(startup, "get_exec", lambda: SimpleNamespace(graph=graph))
    monkeypatch.setattr(startup, "get_schedule", lambda: SimpleNamespace(chunked_prefill_size=8192))
    monkeypatch.setattr(startup, "get_available_gpu_memory", lambda *_: fake.model_runner.free)
    monkeypatch.setattr(startup, "get_spec", lambda: settings)
    return fake


def test_each_narrow_width_is_captured_once_and_lent_for_one_verification_only(worker: Any) -> None:
    from dflash_sglang.plugin.startup import build_states, verifying

    runner, states = worker.model_runner, build_states(worker, NARROW, ALONE)
    assert runner.captured == {width: f"attention of width {width}" for width in NARROW}
    assert sorted(states) == NARROW
    assert runner.init_new_workspace is False
    with verifying(runner, states[2]):
        assert (runner.attn_backend, runner.decode_cuda_graph_runner) == ("attention of width 2", "graphs of width 2")
    assert (runner.attn_backend, runner.decode_cuda_graph_runner) == ("whole blocks' attention", "whole blocks' graphs")


@pytest.mark.parametrize(
    ("rehearsed", "free", "takes", "built"),
    [
        (1, NEEDED - 0.1, 0.5, []),
        (1, NEEDED, 0.5, [1, 4, 2]),
        (1, NEEDED, 0.8, [1]),
        (1, NEEDED + 4.5, 3.0, [1, 4]),
        # SGLang's rehearsal of sampling follows: six tensors of 2048 * 8 rows and 131,072 columns in float32, 48 GB.
        (2048, 1.5 + 48, 1.4, [1]),
        (2048, 1.5 + 47, 1.4, []),
    ],
)
def test_widths_that_do_not_fit_are_left_out_the_least_useful_first(
    worker: Any, rehearsed: int, free: float, takes: float, built: list[int]
) -> None:
    """The second and later ones need what the largest so far has taken, beside what prefills and sampling need."""
    from dflash_sglang.plugin.startup import build_states

    worker.rehearsed, worker.model_runner.free, worker.model_runner.takes = rehearsed, free, takes
    assert list(build_states(worker, NARROW, ALONE)) == built


def test_a_width_that_fails_is_left_out_and_leaves_everything_as_it_was(worker: Any) -> None:
    """Some attention kernels exist for some widths only."""
    from dflash_sglang.plugin.startup import build_states

    worker.model_runner.fails_at = 4
    assert list(build_states(worker, NARROW, ALONE)) == [1, 2]
    assert worker.model_runner.init_new_workspace is False
    assert worker.model_runner.settings.speculative_num_draft_tokens == BLOCK


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("sized_after_capture", [False, True])
def test_steps_are_timed_on_entries_that_have_memory(page_size: int, sized_after_capture: bool) -> None:
    """SGLANG_ENABLE_POST_CAPTURE_KV_SIZING: until graphs are captured, memory lies behind the first page alone."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from dflash_sglang.plugin.startup import made_up_batch

    sizes = {"head_num": 2, "head_dim": 4, "layer_num": 2, "device": "cpu", "enable_memory_saver": False}
    pool = MHATokenToKVPool(size=512, page_size=page_size, dtype=torch.float32, **sizes)
    pool.post_capture_active = sized_after_capture
    descs = pool._build_kv_buffer_descs()
    backed = [desc.prefix_span_bytes(page_size, page_size) for desc in descs]  # as `KvVmmBufferOwner` does
    table = torch.zeros(4, 64, dtype=torch.int32)
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=pool,
        max_total_num_tokens=512,
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
    )
    worker = SimpleNamespace(model_runner=runner, device="cpu", block_size=BLOCK, page_size=page_size)
    with made_up_batch(worker, 4, 32):
        used = table[:, : 32 + 2 * BLOCK].unique()
        ends = [(int(used.max()) + 1) * desc.row_bytes for desc in descs]
    assert all(end <= span for end, span in zip(ends, backed, strict=True)) is sized_after_capture
    assert (len(used) == 4 * (32 + 2 * BLOCK)) is not sized_after_capture, "else every token has an entry of its own"
    assert not table.any(), "the table is as it was"


def test_steps_become_costs_of_rows_of_drafts_and_of_context() -> None:
    from dflash_sglang.plugin.startup import tabulate

    def taken(requests: int, width: int, context: int) -> float:
        """A row takes 1, a draft 5 and 2 for each request, a token of context 0.01, and 0.02 to draft."""
        draft = (5 + 2 * requests + 0.02 * context * requests) if width > 1 else 0.0
        return 10 + requests * width + 0.01 * context * requests + draft

    jobs = [(n, w, 100) for n in (1, 2, 4, 8, 16) for w in (1, 2, 4, 8)] + [(1, 1, 1000), (1, 8, 1000)]
    cost = tabulate({job: taken(*job) for job in jobs})
    assert cost.target_context == pytest.approx(0.01)
    assert cost.draft_context == pytest.approx(0.02)
    for requests, width, context in jobs:
        thought = cost.step_seconds([width] * requests, context * requests)
        assert thought == pytest.approx(taken(requests, width, context), rel=0.1)


def test_a_machine_that_is_slow_with_wide_blocks_alone_is_known_as_such() -> None:
    """Rows that one width has graphs for and another has not: both are measured, at every number of requests."""
    from dflash_sglang.plugin.startup import tabulate

    cost = tabulate({(n, w, 128): (1.0 if w == 1 else 3.0) for n in (1, 2, 4, 8) for w in (1, 4)})
    assert cost.step_seconds([1] * 4) == pytest.approx(1.0)
    assert cost.step_seconds([4] * 2) == pytest.approx(3.0)


def test_drafts_for_more_requests_are_never_cheaper() -> None:
    """Steps without a draft that were timed beside other work would otherwise make the drafts beside them free."""
    from dflash_sglang.plugin.startup import tabulate

    jobs = {(n, w, 128): 10.0 + n * w + 5 * (w > 1) for n in (1, 2, 4, 8) for w in (1, 2, 4, 8)}
    jobs[4, 1, 128] = 30.0
    draft = tabulate(jobs).draft
    assert draft[1] == pytest.approx(5)
    assert draft[1] <= draft[2] <= draft[4] <= draft[8]
