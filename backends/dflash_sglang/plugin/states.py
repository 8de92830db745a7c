"""Attention and CUDA graphs with which the target verifies narrow blocks, made at start-up for each width.

SGLang fixes the width of a verification in its attention and CUDA graphs. So every narrow width has its own of both, as
in SGLang's adaptive EAGLE (`build_adaptive_runtime_state`), swapped in for a verification. They are made from the
memory that SGLang's K/V cache leaves; widths that do not fit are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_exec, get_schedule, get_spec
from sglang.srt.utils import get_available_gpu_memory

from .host import HostWorker
from .ranks import Ranks

logger = logging.getLogger(__name__)
FIRST_GB = 1.5
"""Assumed memory of the first width; a further width is assumed to need as much as the largest so far took."""
PREFILL_MB = 0.5
"""Memory left free for each token of the largest prefill (`--chunked-prefill-size`): activations, features, logits."""
REHEARSED = 6
"""Logits, scaled logits, probabilities, renormalised ones and their sort, drafts' (`dflash_utils`, read in 0.5.23)."""
LEAST_FREE_GB = 1.0  # least memory that is left free


@dataclass(frozen=True)
class WidthState:
    """The target's attention and graphs for blocks of one width."""

    width: int
    attention: Any
    graphs: Any  # None: no graphs, kernels are launched one by one


def build_states(worker: HostWorker, widths: Iterable[int], ranks: Ranks) -> dict[int, WidthState]:
    """Makes states for widths while there is memory, the most useful first. Call it after SGLang has captured its
    graphs.

    Raises:
        RankError: attention or graphs of a width could not be made on one rank; all ranks raise it.
    """
    states: dict[int, WidthState] = {}
    needed, reserve = FIRST_GB, reserve_gb(worker)
    for width in by_use(widths):
        free = ranks.least(free_gb(worker))
        if free < needed + reserve:
            left = sorted(set(widths) - set(states))
            text = "dflash-serve: no memory for widths %s: %.1f GB are free, one needs %.1f beside %.1f to serve"
            logger.warning(text, left, free, needed, reserve)
            break
        states[width] = _build(worker, width, ranks)
        needed = max(needed if width != next(iter(states)) else 0.1, free - ranks.least(free_gb(worker)))
    return states


def by_use(widths: Iterable[int]) -> list[int]:
    """Widths by use: 1 first, because `auto` may not be slower than no speculation; then 4; then narrow to wide."""
    return sorted(widths, key=lambda width: (width != 1, width != 4, width))


def free_gb(worker: HostWorker) -> float:
    """Free memory of this rank's device, in GB."""
    return float(get_available_gpu_memory(worker.device, worker.gpu_id))


def reserve_gb(worker: HostWorker) -> float:
    """Memory that must stay free, in GB: for prefills, and for the rehearsal of sampling that follows us at start-up.

    SGLang's `prewarm_sampling` holds `REHEARSED` tensors [requests * B, V] in float32 at once.
    """
    rows = worker._prewarm_batch_size(worker.block_size) * worker.block_size
    rehearsal = REHEARSED * 4 * rows * worker.model_runner.model_config.vocab_size / 2**30
    prefills = (get_schedule().chunked_prefill_size or 0) * PREFILL_MB / 1024
    return float(max(LEAST_FREE_GB, prefills, rehearsal))


def _build(worker: HostWorker, width: int, ranks: Ranks) -> WidthState:
    """Attention first, on all ranks; graphs (whose capture waits for all ranks) only where all have got so far."""
    with get_spec().override(speculative_num_draft_tokens=width):
        attention = ranks.together(f"width {width}", lambda: _attention(worker))
        graphs = None
        if may_capture():
            graphs = ranks.together(f"width {width}", lambda: _capture(worker, attention, width))
    return WidthState(width, attention, graphs)


def _attention(worker: HostWorker) -> Any:
    runner = worker.model_runner
    workspace = runner.init_new_workspace
    try:
        return runner._get_attention_backend(init_new_workspace=True)
    finally:
        runner.init_new_workspace = workspace


def may_capture() -> bool:
    """True if SGLang captures CUDA graphs here; the same condition as in its own DFlash worker."""
    if current_platform.is_out_of_tree() and not current_platform.capabilities.graph_capture:
        return False
    return bool(get_exec().graph.cuda_graph_config.decode.backend != Backend.DISABLED)


def _capture(worker: HostWorker, attention: Any, width: int) -> Any:
    graphs = worker.model_runner._decode_cuda_graph_runner_cls()(
        worker.model_runner,
        attn_backend=attention,
        speculative_num_steps=1,
        speculative_num_draft_tokens=width,
    )
    logger.info("dflash-serve: captured CUDA graphs for width %d", width)
    return graphs


@contextmanager
def verifying(runner: Any, state: WidthState | None) -> Iterator[None]:
    """Lets the target verify with `state`; None: SGLang's own, for whole blocks."""
    saved = runner.attn_backend, runner.decode_cuda_graph_runner
    if state is not None:
        runner.attn_backend, runner.decode_cuda_graph_runner = state.attention, state.graphs
    try:
        yield
    finally:
        runner.attn_backend, runner.decode_cuda_graph_runner = saved
