"""A width's own attention and CUDA graphs: SGLang fixes the width of a verification in both when it makes them.

As SGLang's adaptive EAGLE does (`build_adaptive_runtime_state`): made once for each width, and swapped in.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_exec, get_spec
from sglang.srt.utils import get_available_gpu_memory

if TYPE_CHECKING:
    from .worker import DFlashServeWorker

logger = logging.getLogger(__name__)
ENOUGH = 2.0
"""GB that must be free for the graphs of another width; with less it runs without."""


@dataclass(frozen=True)
class State:
    """What the target runs with while it verifies blocks of one width."""

    attention: Any
    graphs: Any
    """None = launched kernel by kernel."""


def build_states(worker: DFlashServeWorker, widths: Iterable[int]) -> dict[int, State]:
    """One for each width; call when SGLang has captured its own graphs."""
    return {width: _build(worker, width) for width in sorted(widths)}


@contextmanager
def verifying(runner: Any, state: State | None) -> Iterator[None]:
    """While the target verifies with `state`; None = SGLang's own, for whole blocks."""
    saved = runner.attn_backend, runner.decode_cuda_graph_runner
    if state is not None:
        runner.attn_backend, runner.decode_cuda_graph_runner = state.attention, state.graphs
    try:
        yield
    finally:
        runner.attn_backend, runner.decode_cuda_graph_runner = saved


def _build(worker: DFlashServeWorker, width: int) -> State:
    runner = worker.model_runner
    workspace = runner.init_new_workspace
    with get_spec().override(speculative_num_draft_tokens=width):
        try:
            attention = runner._get_attention_backend(init_new_workspace=True)
        finally:
            runner.init_new_workspace = workspace
        return State(attention, _capture(worker, attention, width) if _may_capture(worker) else None)


def _may_capture(worker: DFlashServeWorker) -> bool:
    if current_platform.is_out_of_tree() or get_exec().graph.cuda_graph_config.decode.backend == Backend.DISABLED:
        return False
    return bool(get_available_gpu_memory(worker.device, worker.gpu_id) > ENOUGH)


def _capture(worker: DFlashServeWorker, attention: Any, width: int) -> Any:
    graphs = worker.model_runner._decode_cuda_graph_runner_cls()(
        worker.model_runner,
        attn_backend=attention,
        speculative_num_steps=1,
        speculative_num_draft_tokens=width,
    )
    logger.info("dflash-serve: captured CUDA graphs for width %d", width)
    return graphs
