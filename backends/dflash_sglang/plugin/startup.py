"""Attention, CUDA graphs and costs of every width, made and measured at start-up.

SGLang fixes the width of a verification in its attention and CUDA graphs. So every narrow width has its own of both, as
in SGLang's adaptive EAGLE (`build_adaptive_runtime_state`), swapped in for a verification. They are made from the
memory that SGLang's K/V cache leaves; widths that do not fit are left out.

Costs are those of whole steps with made-up requests. Nothing has been served yet, so the steps may write into any K/V
entry that has memory. With several ranks the slowest rank's times count. They are the policy's starting point; it
follows the times of served steps.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_exec, get_schedule, get_spec
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.adaptive_runtime_state import SpecRuntimeState
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2
from sglang.srt.utils import get_available_gpu_memory

from dflash_serve.speculation.costs import CostModel, of_context_token, time_in_turns, without_context

from .ranks import RankError, Ranks

logger = logging.getLogger(__name__)
FIRST_GB = 1.5
"""Assumed memory of the first width; a further width is assumed to need as much as the largest so far took."""
PREFILL_MB = 0.5
"""Memory left free for each token of the largest prefill (`--chunked-prefill-size`): activations, features, logits."""
REHEARSED = 6
"""Logits, scaled logits, probabilities, renormalised ones and their sort, drafts' (`dflash_utils`, read in 0.5.23)."""
LEAST_FREE_GB = 1.0  # least memory that is left free
CONTEXT, LONG_CONTEXT = 128, 2048
"""Tokens of context of each request; the difference gives the cost of a token of context."""
REPETITIONS, MOST_REPETITIONS = 3, 9  # repetitions of every step, and of steps whose least time was measured once only
LEAST = 1e-6  # least cost of a draft, in seconds

RunStep = Callable[[Any, int], object]  # runs a step of a batch at a width
Job = tuple[int, int, int]  # requests, width, context of each request


@contextmanager
def verifying(runner: Any, state: SpecRuntimeState | None) -> Iterator[None]:
    """Lets the target verify with `state`; None: SGLang's own, for whole blocks."""
    saved = runner.attn_backend, runner.decode_cuda_graph_runner
    if state is not None:
        runner.attn_backend = state.target_attn_backend
        runner.decode_cuda_graph_runner = state.target_graph_runner
    try:
        yield
    finally:
        runner.attn_backend, runner.decode_cuda_graph_runner = saved


def build_states(worker: Any, widths: Iterable[int], ranks: Ranks) -> dict[int, SpecRuntimeState]:
    """Makes states for widths while there is memory, the most useful first. Call it after SGLang has captured its
    graphs. A width whose attention or graphs cannot be made on one rank is left out on all.
    """
    states: dict[int, SpecRuntimeState] = {}
    needed, reserve = FIRST_GB, _reserve_gb(worker)
    # 1 first, because `auto` may not be slower than no speculation; then 4; then narrow to wide.
    for width in sorted(widths, key=lambda width: (width != 1, width != 4, width)):
        (free,) = ranks.least(free_gb(worker))
        if free < needed + reserve:
            others = sorted(set(widths) - set(states))
            text = "dflash-serve: no memory for widths %s: %.1f GB are free, one needs %.1f beside %.1f to serve"
            logger.warning(text, others, free, needed, reserve)
            break
        try:
            states[width] = _build(worker, width, ranks)
        except RankError as error:
            logger.warning("dflash-serve: no width %d: %s", width, error)
        (left,) = ranks.least(free_gb(worker))
        needed = max(needed if len(states) > 1 else 0.1, free - left)
    return states


def free_gb(worker: Any) -> float:
    """Free memory of this rank's device, in GB."""
    return float(get_available_gpu_memory(worker.device, worker.gpu_id))


def _reserve_gb(worker: Any) -> float:
    """Memory that must stay free, in GB: for prefills, and for the rehearsal of sampling that follows us at start-up.

    SGLang's `prewarm_sampling` holds `REHEARSED` tensors [requests * B, V] in float32 at once.
    """
    rows = worker._prewarm_batch_size(worker.block_size) * worker.block_size
    rehearsal = REHEARSED * 4 * rows * worker.model_runner.model_config.vocab_size / 2**30
    prefills = (get_schedule().chunked_prefill_size or 0) * PREFILL_MB / 1024
    return float(max(LEAST_FREE_GB, prefills, rehearsal))


def _build(worker: Any, width: int, ranks: Ranks) -> SpecRuntimeState:
    """Attention first, on all ranks; graphs (whose capture waits for all ranks) only where all have got so far."""
    runner, graphs = worker.model_runner, None
    # The same condition as in SGLang's own DFlash worker.
    on_platform = not current_platform.is_out_of_tree() or current_platform.capabilities.graph_capture
    widths = {"speculative_num_steps": 1, "speculative_num_draft_tokens": width}
    with get_spec().override(speculative_num_draft_tokens=width):
        attention = ranks.together(f"width {width}", lambda: _attention(runner))
        if on_platform and get_exec().graph.cuda_graph_config.decode.backend != Backend.DISABLED:
            capture = runner._decode_cuda_graph_runner_cls()
            graphs = ranks.together(f"width {width}", lambda: capture(runner, attn_backend=attention, **widths))
            logger.info("dflash-serve: captured CUDA graphs for width %d", width)
    return SpecRuntimeState(
        **widths,
        target_attn_backend=attention,
        target_graph_runner=graphs,
        draft_attn_backend=None,  # the drafter's own serve every width: it drafts whole blocks
        cuda_graph_runner=None,
        draft_extend_attn_backend=None,
        cuda_graph_runner_for_draft_extend=None,
    )


def _attention(runner: Any) -> Any:
    workspace = runner.init_new_workspace
    try:
        return runner._get_attention_backend(init_new_workspace=True)
    finally:
        runner.init_new_workspace = workspace


@torch.no_grad()  # not inference_mode: buffers that are made here serve later, outside of it
def measure(worker: Any, widths: list[int], run: RunStep, ranks: Ranks) -> CostModel:
    """Times steps at every width and 1, 2, 4, ... requests up to a full batch.

    Args:
        widths: the widths that the server verifies at, 1 and B among them.

    Raises:
        RankError: a batch could not be made, or a step failed, on one rank.
    """
    most = int(worker.model_runner.max_running_requests)
    long = min(LONG_CONTEXT, int(worker.model_runner.model_config.context_len) - 2 * max(widths))
    short = min(CONTEXT, long)
    counts = sorted({most, *(2**i for i in range(most.bit_length()))})
    jobs: list[Job] = [(requests, width, short) for requests in counts for width in widths]
    jobs += [(1, width, long) for width in (1, max(widths)) if long > short]

    def agreed(again: list[Job]) -> list[Job]:
        return ranks.from_first("the steps to time", lambda: again)

    times = time_in_turns(jobs, lambda job: timed(worker, job, run, ranks), REPETITIONS, MOST_REPETITIONS, agreed)
    slowest = (-time for time in ranks.least(*(-min(times[job]) for job in jobs)))
    return tabulate(dict(zip(jobs, slowest, strict=True)))


def timed(worker: Any, job: Job, run: RunStep, ranks: Ranks) -> float:
    """Seconds of one step on this rank, the device's work included."""
    requests, width, context = job
    made_up, device = made_up_batch(worker, requests, context), torch.get_device_module(worker.device)

    def step() -> float:
        device.synchronize()
        start = perf_counter()
        run(batch, width)
        device.synchronize()
        return perf_counter() - start

    with ExitStack() as stack:
        batch = ranks.together("a batch to time", lambda: stack.enter_context(made_up))
        return ranks.together("a timed step", step)


@contextmanager
def made_up_batch(worker: Any, requests: int, context: int) -> Iterator[Any]:
    """A `ScheduleBatch` of greedy requests; their contexts are arbitrary entries of the K/V cache.

    Where SGLang sizes its K/V after the capture of its graphs (mem_cache/kv_vmm_backing.py), only the first page has
    memory by now, and all requests share its entries. A token of context then seems cheaper than it is; the policy
    corrects that by the times of served steps.
    """
    runner = worker.model_runner
    lengths = torch.full((requests,), context, dtype=torch.int64)
    rows = torch.arange(requests, dtype=torch.int64, device=worker.device)
    table = runner.req_to_token_pool.req_to_token
    extent = context + 2 * int(worker.block_size)
    entries = torch.arange(requests * extent, device=table.device)
    if runner.token_to_kv_pool.post_capture_active:
        entries %= int(worker.page_size)
    else:
        entries = entries % int(runner.max_total_num_tokens) + 1
    saved = table[:requests, :extent].clone()
    table[:requests, :extent] = entries.view(requests, extent).to(table.dtype)
    anchors, on_device = torch.ones_like(rows), lengths.to(worker.device)
    batch = ScheduleBatch(
        reqs=[Req(f"made-up-{i}", "", array("q", [1]), SamplingParams(temperature=0.0)) for i in range(requests)],
        device=worker.device,
        req_pool_indices=rows,
        seq_lens=on_device,
        seq_lens_cpu=lengths,
        orig_seq_lens=on_device.to(torch.int32),
        multimodal_inputs=[None] * requests,
        forward_mode=ForwardMode.DECODE,
        spec_algorithm=runner.spec_algorithm,
        spec_info=make_draft_input_v2(bonus_tokens=anchors, new_seq_lens=on_device),
        can_run_decode_cuda_graph=True,
        # For recurrent layers: no request has a state that the prefix cache keeps.
        req_to_token_pool=runner.req_to_token_pool,
        tree_cache=SimpleNamespace(page_size=worker.page_size),
        mamba_lazy_spec_track_positions_cpu=[0] * requests,
    )
    try:
        yield batch
    finally:
        table[:requests, :extent] = saved


def tabulate(seconds: Mapping[Job, float]) -> CostModel:
    """Costs from measured steps.

    Steps without a draft give the target's costs by rows. The remaining time of a step with a draft is the draft's
    cost. The cost of context tokens is separate from both. A draft for more requests costs no less than one for fewer.
    """
    short, long = (pick(context for *_, context in seconds) for pick in (min, max))
    widest = max(width for _, width, _ in seconds)

    def per_token(width: int) -> float:  # of context, of one request
        return of_context_token(seconds[1, width, short], seconds[1, width, long], long - short)

    alone, beside = per_token(1), max(per_token(1), per_token(widest))
    bare = {
        (n, w): without_context(taken, n * short * (alone if w == 1 else beside))
        for (n, w, context), taken in seconds.items()
        if context == short
    }
    target = {requests: taken for (requests, width), taken in bare.items() if width == 1}
    draft: dict[int, float] = {}
    least = LEAST
    for requests in sorted(target):  # from few to many: wide steps of few requests give the costs of many rows
        known, most = CostModel(target=target, draft={1: LEAST}), max(target)
        drafted = {w: taken for (n, w), taken in bare.items() if n == requests and w > 1}
        extra = [taken - known.of_step(requests * w, 0) for w, taken in drafted.items() if requests * w <= most]
        draft[requests] = least = max(least, median(extra or [least]))
        for width, taken in drafted.items():
            target.setdefault(requests * width, max(LEAST, taken - draft[requests]))
    return CostModel(target=target, draft=draft, target_context=alone, draft_context=beside - alone)
