"""Where a block lies: K/V slots and positions of the tokens after each request's prefix (SGLang 0.5.22-0.5.23)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func

if TYPE_CHECKING:
    from .worker import DFlashServeWorker


def window(worker: DFlashServeWorker, batch: Any, width: int) -> tuple[Any, Any]:
    """K/V slots [n * width] of the blocks' first positions, reserved by the scheduler, and SGLang's plan of them."""
    prefix, runner = batch.seq_lens, worker.model_runner
    slots = assign_extend_cache_locs_func(
        req_pool_indices=batch.req_pool_indices,
        req_to_token=runner.req_to_token_pool.req_to_token,
        start_offset=prefix,
        end_offset=prefix + width,
        batch_size=len(prefix),
        draft_token_num=width,
        device=worker.device,
    )
    known = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else batch.spec_info.nxt_kv_lens_cpu
    plan = runner.kv_index_translator.plan(
        req_pool_indices=batch.req_pool_indices,
        seq_lens=prefix,
        seq_lens_cpu=known,
        write_virtual=slots,
        read_extent=width,
    )
    return slots, plan


def positions_of(prefix: Any, width: int) -> Any:
    """Positions [n, width] of the slots after each prefix."""
    return prefix[:, None] + torch.arange(width, device=prefix.device)
