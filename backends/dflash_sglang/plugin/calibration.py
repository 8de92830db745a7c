"""What steps cost on this machine: measured at start-up on made-up blocks, in K/V entries that no request has yet.

Several ranks take the slowest one's figures, so that all of them choose the same widths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from dflash_serve.speculation.costs import CostModel

from .drafting import block_entries, draft_block, positions_of
from .host import HostWorker
from .ranks import Ranks
from .states import WidthState, verifying

CONTEXT = 128
"""Tokens of context while measuring: attention is a small part of a step at this size."""
REPETITIONS = 3


@torch.no_grad()  # not inference_mode: buffers that are made here serve later, outside of it
def measure(worker: HostWorker, states: Mapping[int, WidthState], ranks: Ranks) -> CostModel:
    """Times the target's pass by rows, and the drafter's by requests, up to full batches.

    Args:
        states: what the target runs with, by width; SGLang's own where there is none.
    """
    requests = _doubling(int(worker.model_runner.max_running_requests))
    shapes = {n * w: (n, w) for n in requests for w in sorted({*states, worker.block_size})}
    jobs: list[tuple[str, int, Callable[[], object]]] = [
        ("target", rows, _target_pass(worker, n, w, states.get(w))) for rows, (n, w) in shapes.items()
    ]
    jobs += [("draft", n, _draft_pass(worker, n)) for n in requests]
    seconds = torch.full((len(jobs),), float("inf"), dtype=torch.float64)
    for _ in range(REPETITIONS):  # interleaved: a busy spell hits all shapes alike, and noise only ever adds time
        for i, (_, _, run) in enumerate(jobs):
            seconds[i] = min(float(seconds[i]), _timed(run, worker.device))
    seconds = ranks.slowest(seconds)
    table: dict[str, dict[int, float]] = {"target": {}, "draft": {}}
    for (kind, size, _), time in zip(jobs, seconds.tolist(), strict=True):
        table[kind][size] = time
    return CostModel.model_validate(table)


def _doubling(limit: int) -> list[int]:
    """1, 2, 4, ... and the limit itself."""
    return sorted({limit, *(2**i for i in range(limit.bit_length()) if 2**i <= limit)})


def _idle_batch(worker: HostWorker, requests: int) -> SimpleNamespace:
    """As much of SGLang's batch as a step looks at; all its K/V entries are the padding entry."""
    context = min(CONTEXT, worker.model_runner.model_config.context_len - worker.block_size - 1)
    lengths = torch.full((requests,), context, dtype=torch.int64)
    return SimpleNamespace(
        seq_lens=lengths.to(worker.device),
        seq_lens_cpu=lengths,
        req_pool_indices=torch.arange(requests, dtype=torch.int64, device=worker.device),
        spec_info=SimpleNamespace(
            bonus_tokens=torch.ones(requests, dtype=torch.int64, device=worker.device), nxt_kv_lens_cpu=None
        ),
        can_run_decode_cuda_graph=True,
    )


def _draft_pass(worker: HostWorker, requests: int) -> Callable[[], object]:
    batch = _idle_batch(worker, requests)
    return lambda: draft_block(worker, batch)


def _target_pass(worker: HostWorker, requests: int, width: int, state: WidthState | None) -> Callable[[], object]:
    return lambda: _verify(worker, _idle_batch(worker, requests), width, state)


def _verify(worker: HostWorker, batch: Any, width: int, state: WidthState | None) -> Any:
    """The target's pass over made-up blocks of `width` slots; gives the argmax of its logits."""
    runner = worker.model_runner
    forward_batch = _verify_batch(worker, batch, width)
    with verifying(runner, state):
        graphs = runner.decode_cuda_graph_runner
        if graphs and graphs.can_run_graph(forward_batch):
            graphs.load_batch(forward_batch)
        else:
            runner.attn_backend.init_forward_metadata(forward_batch)
        return runner.forward(forward_batch, skip_attn_backend_init=True).logits_output.next_token_logits.argmax(-1)


def _verify_batch(worker: HostWorker, batch: Any, width: int) -> Any:
    """The ForwardBatch of that pass, in SGLang's terms."""
    runner, requests = worker.model_runner, len(batch.seq_lens)
    entries, kv_plan = block_entries(worker, batch, width)
    tokens = torch.ones(requests * width, dtype=torch.int64, device=worker.device)
    positions = positions_of(batch.seq_lens, width).reshape(-1)
    block = DFlashVerifyInput(
        draft_token=tokens, positions=positions, draft_token_num=width, custom_mask=None, kv_loc_plan=kv_plan
    )
    lengths = batch.seq_lens_cpu + width
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=requests,
        input_ids=tokens,
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        out_cache_loc=entries,
        seq_lens_sum=int(lengths.sum()),
        seq_lens_cpu=lengths,
        positions=positions,
        spec_algorithm=runner.spec_algorithm,
        spec_info=block,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        global_num_token_non_padded_cpu=requests * width,
        can_run_decode_cuda_graph=True,
    )
    kv_plan.bind(forward_batch, runner.kv_index_translator)
    return forward_batch


def _timed(run: Callable[[], object], device: Any) -> float:
    """Seconds of one call, its device's work included."""
    module = torch.get_device_module(device)
    module.synchronize()
    start = perf_counter()
    run()
    module.synchronize()
    return perf_counter() - start
