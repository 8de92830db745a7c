"""What the target verifies narrow blocks with, made at start-up, one for each width.

SGLang fixes the width of a verification in its attention and in its CUDA graphs when it makes them. So every narrow
width has its own of both, as in SGLang's adaptive EAGLE (`build_adaptive_runtime_state`): made once, swapped in for a
verification. They are made when SGLang has taken its K/V cache, from what is left: nothing is made that does not fit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_exec, get_schedule, get_spec
from sglang.srt.utils import get_available_gpu_memory

from .host import HostWorker
from .ranks import Ranks

logger = logging.getLogger(__name__)
FIRST_GB = 1.5
"""What the first width is taken to need; every further one needs what the largest so far has taken."""
PREFILL_MB = 0.5
"""Left free for each token of the largest prefill (`--chunked-prefill-size`): activations, features, logits."""
LEAST_FREE_GB = 1.0
"""Left free in any case."""
T = TypeVar("T")


class CannotBuildError(Exception):
    """A width's attention or graphs failed, on this rank or another."""


@dataclass(frozen=True)
class WidthState:
    """What the target runs with while it verifies blocks of one width."""

    width: int
    attention: Any
    graphs: Any
    """None = launched kernel by kernel."""


def build_states(worker: HostWorker, widths: Iterable[int], ranks: Ranks) -> dict[int, WidthState]:
    """One for each width for which there is memory, the most useful first; call it when SGLang has captured its graphs.

    Raises:
        CannotBuildError: one failed, on whatever rank; all ranks raise it.
    """
    states: dict[int, WidthState] = {}
    needed = FIRST_GB
    for width in by_use(widths):
        free = ranks.least(free_gb(worker))
        if free < needed + reserve_gb():
            left = sorted(set(widths) - set(states))
            text = "dflash-serve: no memory for widths %s: %.1f GB are free, one needs %.1f beside %.1f for prefills"
            logger.warning(text, left, free, needed, reserve_gb())
            break
        states[width] = _build(worker, width, ranks)
        needed = max(needed if width != next(iter(states)) else 0.1, free - ranks.least(free_gb(worker)))
    return states


def by_use(widths: Iterable[int]) -> list[int]:
    """1 (speculation off) is what keeps the promise of never being slower; then 4, then from narrow to wide."""
    return sorted(widths, key=lambda width: (width != 1, width != 4, width))


def free_gb(worker: HostWorker) -> float:
    """Free memory of this rank's device, in GB."""
    return float(get_available_gpu_memory(worker.device, worker.gpu_id))


def reserve_gb() -> float:
    """What must stay free for prefills to come."""
    return float(max(LEAST_FREE_GB, (get_schedule().chunked_prefill_size or 0) * PREFILL_MB / 1024))


def _build(worker: HostWorker, width: int, ranks: Ranks) -> WidthState:
    """Attention first, on all ranks; graphs (whose capture waits for all ranks) only where all have got so far."""
    with get_spec().override(speculative_num_draft_tokens=width):
        attention = _together(ranks, width, lambda: _attention(worker))
        graphs = _together(ranks, width, lambda: _capture(worker, attention, width)) if may_capture() else None
    return WidthState(width, attention, graphs)


def _together(ranks: Ranks, width: int, make: Callable[[], T]) -> T:
    """What `make` makes, if it does so on every rank.

    Raises:
        CannotBuildError: it failed on one.
    """
    made, error = None, None
    try:
        made = make()
    except Exception as failure:
        error = failure
    if not ranks.all_agree(error is None):
        raise CannotBuildError(f"width {width}: {error or 'another rank failed'}") from error
    return made  # type: ignore[return-value]


def _attention(worker: HostWorker) -> Any:
    runner = worker.model_runner
    workspace = runner.init_new_workspace
    try:
        return runner._get_attention_backend(init_new_workspace=True)
    finally:
        runner.init_new_workspace = workspace


def may_capture() -> bool:
    """Whether SGLang captures CUDA graphs here, as its own DFlash worker asks."""
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
    """Lets the target verify with `state`; None = SGLang's own, for whole blocks."""
    saved = runner.attn_backend, runner.decode_cuda_graph_runner
    if state is not None:
        runner.attn_backend, runner.decode_cuda_graph_runner = state.attention, state.graphs
    try:
        yield
    finally:
        runner.attn_backend, runner.decode_cuda_graph_runner = saved
