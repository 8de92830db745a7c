"""Measures the costs of whole steps on this machine, at start-up, with made-up requests.

Nothing has been served yet, so the steps may write into any K/V entry. With several ranks the slowest rank's times
count. The costs are kept in the cache under a key of everything that changes them. They are the policy's starting
point; it follows the times of served steps.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2

from dflash_serve.common.files import cache_home, keep_record, read_record
from dflash_serve.common.provenance import processor, versions
from dflash_serve.speculation.costs import CostModel, is_confirmed

from .host import HostWorker
from .ranks import Ranks

CONTEXT, LONG_CONTEXT = 128, 2048
"""Tokens of context of each request; the difference gives the cost of a token of context."""
REPETITIONS, MOST_REPETITIONS = 3, 9  # repetitions of every step, and of steps whose least time was measured once only
MOST_SPREAD = 0.2  # median over least time, less 1, from which costs are not kept: other work disturbed the measurement
LEAST = 1e-6  # least cost of a draft, in seconds

RunStep = Callable[[Any, int], object]  # runs a step of a batch at a width
Job = tuple[int, int, int]  # requests, width, context of each request


def costs_of(worker: HostWorker, widths: list[int], run: RunStep, ranks: Ranks) -> CostModel:
    """The kept costs of this server, or a fresh measurement.

    Args:
        widths: the widths it verifies at, 1 and B among them.
    """
    path = cache_home() / "cost" / f"sglang-{_key(worker, widths, ranks)}.json"
    kept = ranks.from_first("the kept costs", lambda: read_record(path, CostModel))
    if kept is not None:
        return kept
    cost, spread = measure(worker, widths, run, ranks)
    if ranks.is_first and spread <= MOST_SPREAD:
        keep_record(path, cost, otherwise="dflash-serve: costs are measured again next time")
    return cost


def _key(worker: HostWorker, widths: list[int], ranks: Ranks) -> str:  # everything that changes the costs
    runner, draft = worker.model_runner, worker.draft_model_runner
    cuda = str(worker.device).startswith("cuda")
    facts = {
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "target": runner.model_config.hf_config.to_json_string(),
        "drafter": draft.model_config.hf_config.to_json_string(),
        "dtypes": [str(runner.dtype), str(runner.kv_cache_dtype), str(draft.dtype)],
        "attention": [type(one.attn_backend).__name__ for one in (runner, draft)],
        "graphs": type(runner.decode_cuda_graph_runner).__name__,
        "ranks": ranks.count,
        "widths": widths,
        "requests": int(runner.max_running_requests),
        "threads": None if cuda else torch.get_num_threads(),
        "versions": versions("sglang", "torch", "dflash-serve"),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


@torch.no_grad()  # not inference_mode: buffers that are made here serve later, outside of it
def measure(worker: HostWorker, widths: list[int], run: RunStep, ranks: Ranks) -> tuple[CostModel, float]:
    """Times steps at every width and 1, 2, 4, ... requests up to a full batch; returns costs and their spread."""
    most = int(worker.model_runner.max_running_requests)
    long = min(LONG_CONTEXT, int(worker.model_runner.model_config.context_len) - 2 * max(widths))
    short = min(CONTEXT, long)
    jobs: list[Job] = [(requests, width, short) for requests in _doubling(most) for width in widths]
    jobs += [(1, width, long) for width in (1, max(widths)) if long > short]
    times: dict[Job, list[float]] = {job: [] for job in jobs}
    # Interleaved, so that other work disturbs all alike; the first turn warms up.
    for turn in range(1 + MOST_REPETITIONS):
        again = [job for job in jobs if turn <= REPETITIONS or not is_confirmed(times[job])]
        for job in ranks.from_first("the steps to time", lambda again=again: again):  # type: ignore[misc]
            seconds = _together_timed(worker, job, run, ranks)
            if turn:
                times[job].append(seconds)
    least = ranks.slowest(torch.tensor([min(times[job]) for job in jobs], dtype=torch.float64)).tolist()
    spread = ranks.slowest(torch.tensor([median(median(t) / min(t) - 1 for t in times.values())], dtype=torch.float64))
    return tabulate(dict(zip(jobs, least, strict=True))), float(spread)


def _together_timed(worker: HostWorker, job: Job, run: RunStep, ranks: Ranks) -> float:
    """Seconds of one step on this rank.

    Raises:
        RankError: its batch could not be made, or the step failed, on one rank.
    """
    requests, width, context = job
    made_up = made_up_batch(worker, requests, context)
    with ExitStack() as stack:
        batch = ranks.together("a batch to time", lambda: stack.enter_context(made_up))
        return ranks.together("a timed step", lambda: _timed(lambda: run(batch, width), worker.device))


def tabulate(seconds: Mapping[Job, float]) -> CostModel:
    """Costs from measured steps.

    Steps without a draft give the target's costs by rows. The remaining time of a step with a draft is the draft's
    cost. The cost of context tokens is separate from both. A draft for more requests costs no less than one for fewer.
    """
    short = min(context for *_, context in seconds)
    widest = max(width for _, width, _ in seconds)
    alone, beside = (_per_token(seconds, width, short) for width in (1, widest))
    beside = max(alone, beside)
    bare = {
        (n, w): max(LEAST, taken - n * short * (alone if w == 1 else beside))
        for (n, w, context), taken in seconds.items()
        if context == short
    }
    target = {requests: taken for (requests, width), taken in bare.items() if width == 1}
    draft: dict[int, float] = {}
    least = LEAST
    for requests in sorted(target):  # from few to many: wide steps of few requests give the costs of many rows
        known, most = CostModel(target=target, draft={1: LEAST}), max(target)
        drafted = {w: taken for (n, w), taken in bare.items() if n == requests and w > 1}
        extra = [taken - known.target_seconds(requests * w) for w, taken in drafted.items() if requests * w <= most]
        draft[requests] = least = max(least, median(extra or [least]))
        for width, taken in drafted.items():
            target.setdefault(requests * width, max(LEAST, taken - draft[requests]))
    return CostModel(target=target, draft=draft, target_context=alone, draft_context=beside - alone)


def _per_token(seconds: Mapping[Job, float], width: int, short: int) -> float:  # of context, of one request
    long = max(context for *_, context in seconds)
    if long == short:
        return 0.0
    return max(0.0, seconds[1, width, long] - seconds[1, width, short]) / (long - short)


def _doubling(limit: int) -> list[int]:  # 1, 2, 4, ... and the limit itself
    return sorted({limit, *(2**i for i in range(limit.bit_length()) if 2**i <= limit)})


@contextmanager
def made_up_batch(worker: HostWorker, requests: int, context: int) -> Iterator[Any]:
    """A `ScheduleBatch` of greedy requests; their contexts are arbitrary entries of the K/V cache."""
    runner = worker.model_runner
    lengths = torch.full((requests,), context, dtype=torch.int64)
    rows = torch.arange(requests, dtype=torch.int64, device=worker.device)
    table = runner.req_to_token_pool.req_to_token
    extent = context + 2 * int(worker.block_size)
    entries = torch.arange(requests * extent, device=table.device) % int(runner.max_total_num_tokens) + 1
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
    )
    try:
        yield batch
    finally:
        table[:requests, :extent] = saved


def _timed(run: Callable[[], object], device: Any) -> float:  # the device's work included
    module = torch.get_device_module(device)
    module.synchronize()
    start = perf_counter()
    run()
    module.synchronize()
    return perf_counter() - start
