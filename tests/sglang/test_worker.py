"""Our worker beside SGLang's own code, without a server: what is counted, what it leaves to SGLang, and its buffers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

BLOCK, VOCAB, CANDIDATES = 8, 11, 3


@pytest.mark.parametrize(
    ("ranks", "counts"),
    [
        ({"tp_rank": 0, "attn_tp_rank": 0, "attn_cp_rank": 0}, True),
        ({"tp_rank": 1, "attn_tp_rank": 1, "attn_cp_rank": 0}, False),
        ({"tp_rank": 1, "attn_tp_rank": 0, "attn_cp_rank": 1}, False),
        ({"tp_rank": 2, "attn_tp_rank": 0, "attn_cp_rank": 0}, True),  # attention is data-parallel: requests of its own
    ],
)
def test_every_request_is_counted_on_one_rank(
    monkeypatch: pytest.MonkeyPatch, ranks: dict[str, int], counts: bool
) -> None:
    from sglang.srt import runtime_context
    from sglang.srt.arg_groups import overrides

    from dflash_sglang.plugin import results

    settings = SimpleNamespace(enable_metrics=True, served_model_name="m", speculative_num_draft_tokens=BLOCK)
    monkeypatch.setattr(overrides, "resolving_view", lambda given: given)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(**ranks))
    listeners: list[Any] = []
    monkeypatch.setattr(results.RESULTS, "listeners", listeners)
    monkeypatch.setattr(results, "SpeculationMetrics", lambda *given: SimpleNamespace(verified=given))
    runner = SimpleNamespace(device_timer=None)
    results.watch(SimpleNamespace(server_args=settings, draft_model_runner=runner))
    assert [(name, block) for name, block, _ in listeners] == [("m", BLOCK)] * counts
    assert (runner.device_timer is not None) is counts


@pytest.mark.parametrize(("mode", "whole"), [("null", False), ("prefill", True), ("decode", True)])
def test_one_half_of_a_pair_verifies_whole_blocks(monkeypatch: pytest.MonkeyPatch, mode: str, whole: bool) -> None:
    """A request that comes prefilled to a decode server was not at our prefill, where its penalties begin to count."""
    from dflash_sglang.plugin import worker

    mamba = SimpleNamespace(mamba_backend="triton", enable_linear_replayssm_spec=False)
    overlap = SimpleNamespace(enable_two_batch_overlap=False)
    monkeypatch.setattr(worker, "get_exec", lambda: SimpleNamespace(mamba=mamba, overlap=overlap))
    monkeypatch.setattr(worker, "get_parallel", lambda: SimpleNamespace(attn_dp_enabled=False, attn_cp_size=1))
    disagg = SimpleNamespace(disaggregation_mode=mode, enable_pdmux=False)
    monkeypatch.setattr(worker, "get_disagg", lambda: disagg)
    built: Any = SimpleNamespace(
        model_runner=SimpleNamespace(attn_backend=None), lilicorr=None, _is_domino=False, block_size=BLOCK
    )
    built._need_mamba_verify_commit, built.device = False, "cuda"
    assert worker.whole_only(built) == ("it is one half of a disaggregated pair" if whole else None)


def test_a_selectors_probabilities_keep_no_more_memory_than_whole_blocks_of_the_same_requests_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang keeps its buffer of [requests, slots, vocabulary], and doubles the requests of one of another shape."""
    from sglang.srt.speculative import dflash_worker_v2 as theirs

    from dflash_sglang.plugin.step import _accept

    seen: list[torch.Tensor] = []

    def accept_sampling(*, candidates: torch.Tensor, draft_probs: torch.Tensor, **_: Any) -> Any:
        seen.append(draft_probs.clone())
        return torch.zeros(len(candidates)), torch.zeros(len(candidates)), None

    def accept_block(*, target_predict: Any, prefix_lens: Any, bs: int, **given: Any) -> Any:
        ids, rows = worker._selector_sample
        theirs.DFlashWorkerV2._selector_sampling_accept(worker, candidate_ids=ids, q_rows=rows, **given)
        return None, torch.ones(bs, dtype=torch.int64), None, None, None

    monkeypatch.setattr(theirs, "accept_sampling", accept_sampling)
    worker = SimpleNamespace(block_size=BLOCK, _draft_probs_buf=None, _block_verification=False)
    worker._ensure_accept_bonus_buffers, worker._accept_block = lambda _: None, accept_block
    for requests, width, kept in [(6, 2, 1), (9, 2, 2), (1, BLOCK, 2), (3, BLOCK, 4), (30, 2, 8), (2, 4, 8)]:
        ids = torch.rand(requests, BLOCK - 1, VOCAB).argsort(-1)[..., :CANDIDATES]
        shares = torch.rand(requests, BLOCK - 1, CANDIDATES)
        worker._selector_sample = ids, shares
        batch = SimpleNamespace(sampling_info=None, seq_lens=torch.zeros(requests, dtype=torch.int64))
        logits = SimpleNamespace(next_token_logits=torch.zeros(requests * width, VOCAB))
        tokens = torch.zeros(requests, width, dtype=torch.int64)
        _accept(worker, batch, None, tokens, logits, None, None)
        expected = torch.zeros(requests, BLOCK - 1, VOCAB).scatter(-1, ids, shares)[:, : width - 1]
        assert torch.equal(seen[-1], expected)
        assert worker._draft_probs_buf.shape == (kept, BLOCK - 1, VOCAB)
        assert not worker._draft_probs_buf.any()
        assert worker.block_size == BLOCK


def test_a_request_with_a_width_of_its_own_keeps_the_first_tokens_of_its_block() -> None:
    from dflash_sglang.plugin.step import _limited

    tokens = torch.tensor([[5, 6, 7, 0], [5, 6, 7, 0], [8, 9, 0, 0], [3, 0, 0, 0]])
    gained, bonus = torch.tensor([3, 3, 2, 1], dtype=torch.int32), torch.tensor([7, 7, 9, 3])
    kept, last = _limited(gained, bonus, tokens, torch.tensor([4, 1, 2, 3]))
    assert (kept.tolist(), last.tolist()) == ([3, 1, 2, 1], [7, 5, 9, 3])
    assert (kept.dtype, last.dtype) == (gained.dtype, bonus.dtype)


def test_own_widths_go_to_the_device_where_they_change_something_and_once() -> None:
    from dflash_sglang.plugin.worker import WidthWorker

    worker: Any = SimpleNamespace(device="cpu", _own=([], None))
    requests = [SimpleNamespace(_dflash_serve_most_slots=2), SimpleNamespace()]
    found = WidthWorker._own_widths(worker, requests, 8)
    assert found is not None
    assert found.tolist() == [2, 8]
    assert WidthWorker._own_widths(worker, requests, 8) is found
    assert WidthWorker._own_widths(worker, requests, 2) is None
    assert WidthWorker._own_widths(worker, requests[1:], 8) is None
