"""Measurements that the embedded engine makes when it starts: the cost of its steps, and the faster dtype on a CPU.

A step's cost is the time of a whole step with drafts that cost nothing: the host takes a large share of a small model's
step. On a GPU it is the time of one of several captured steps, each launched before the one before is read; drafts are
timed by themselves. The costs only seed the width policy, which corrects them by the steps that it sees.

The figures are kept in the cache folder under everything that changes them, with their spread; a measurement with a
large spread is repeated at the next start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from math import ceil
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn

from dflash_serve.checkpoint.source import target_folder
from dflash_serve.checkpoint.target_config import read_target_config
from dflash_serve.common.files import cache_home
from dflash_serve.common.progress import doing
from dflash_serve.common.provenance import processor, versions
from dflash_serve.common.store import keep_record, read_record
from dflash_serve.deployment.description import Deployment
from dflash_serve.models.compiled.build import kernels_id
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.kv_cache import Span, to_device
from dflash_serve.models.layers import pack_linear
from dflash_serve.models.loader import is_stored_in_bfloat16
from dflash_serve.models.target import TargetModel
from dflash_serve.speculation.costs import CostModel, of_context_token, time_in_turns, without_context
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.policy import FixedWidth

from .launch import CHOSEN_ALREADY
from .model_runner import Shape, sizes
from .request import Request
from .scheduler import Scheduler
from .speculator import Speculator

log = logging.getLogger(__name__)

# Tokens of context while measuring; the difference gives the price of a token of context.
CONTEXT, LONG_CONTEXT = 128, 1024
# Repetitions of every step, and of a step whose least time was not met twice.
REPETITIONS, MOST_REPETITIONS = 5, 15
# Consecutive steps, or passes of the drafter, that are timed together where steps are launched ahead.
IN_A_ROW = 4
# Up to this number of rows, all rows belong to one request.
ONE_BLOCK = 8
# A measurement with a larger spread was disturbed by other work and is repeated at the next start.
LARGE_SPREAD = 0.2

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Rows of a step without a draft, of one block, and of a batch of blocks.
DTYPE_ROWS = (1, 8, 32)
DTYPE_REPETITIONS = 6
# bfloat16 must be this much faster than float32: its greedy answers differ where two tokens are nearly alike.
WORTH = 1.1


class Calibration(BaseModel):
    """Measured costs and their spread."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cost: CostModel
    spread: NonNegativeFloat  # median over all figures of (median of its repetitions / least of them - 1)


def cost_of(target: TargetModel, drafter: Drafter, block_size: int, entries: int) -> CostModel:
    """Costs of batches of up to `entries` requests: cached, or measured anew if the cached ones have a large spread."""
    path = _path(target, drafter, block_size, entries)
    kept = read_record(path, Calibration)
    if kept is not None and kept.spread <= LARGE_SPREAD:
        return kept.cost
    fresh = measure(target, drafter, block_size, entries)
    if kept is not None and kept.spread <= fresh.spread:
        return kept.cost
    keep_record(path, fresh, otherwise="the cost table is measured again next time")
    return fresh.cost


def kept_cost(target: TargetModel, drafter: Drafter, block_size: int, entries: int) -> CostModel | None:
    """The costs that an earlier start measured; None = there are none."""
    kept = read_record(_path(target, drafter, block_size, entries), Calibration)
    return None if kept is None else kept.cost


def _path(target: TargetModel, drafter: Drafter, block_size: int, entries: int) -> Path:
    return cache_home() / "cost" / f"{_key(target, drafter, block_size, entries)}.json"


@torch.inference_mode()
def measure(target: TargetModel, drafter: Drafter, block_size: int, entries: int) -> Calibration:
    """Times steps by rows and drafter passes by requests, up to full batches, over small scratch caches."""
    long = min(LONG_CONTEXT, target.config.max_position_embeddings - 2 * block_size)
    bench = _Bench(target, drafter, block_size, entries, CONTEXT)
    jobs: dict[tuple[str, int], Callable[[], float]] = {}
    widths = sizes(1, block_size) if bench.static else range(1, block_size + 1)
    for rows in sorted({*widths, *(n * block_size for n in sizes(1, entries))}):
        jobs["target", rows] = bench.target_step(rows)
    for requests in sizes(1, entries):
        jobs["draft", requests] = bench.draft_pass(requests)
    if long > CONTEXT:
        alone = _Bench(target, drafter, block_size, 1, long)
        for rows in (1, min(block_size, ONE_BLOCK)):
            jobs["target_context", rows] = alone.target_step(rows)
        jobs["draft_context", 1] = alone.draft_pass(1)
    with doing("measuring step times", REPETITIONS * len(jobs)) as work:

        def timed(job: tuple[str, int]) -> float:
            work.advance()
            return jobs[job]()

        times = time_in_turns(jobs, timed, REPETITIONS, MOST_REPETITIONS)
    least = {job: min(seconds) for job, seconds in times.items()}
    spread = median(median(seconds) / min(seconds) - 1 for seconds in times.values())
    return Calibration(cost=tabulate(least, entries, long), spread=spread)


def tabulate(seconds: Mapping[tuple[str, int], float], entries: int, long: int) -> CostModel:
    """The costs of passes over contexts of CONTEXT tokens, and of some passes of one request over `long` tokens."""
    target, draft, target_context, draft_context = (
        {size: taken for (part, size), taken in seconds.items() if part == kind}
        for kind in ("target", "draft", "target_context", "draft_context")
    )
    of_token, of_row = _slopes(target, target_context, long)
    of_draft = sum(_slopes(draft, draft_context, long))
    bare_target = {
        rows: without_context(taken, CONTEXT * (of_token * _contexts(rows, entries) + of_row * rows))
        for rows, taken in target.items()
    }
    bare_draft = {count: without_context(taken, CONTEXT * of_draft * count) for count, taken in draft.items()}
    return CostModel(
        target=bare_target, draft=bare_draft, target_context=of_token, draft_context=of_draft, target_attention=of_row
    )


def _slopes(short: Mapping[int, float], long: Mapping[int, float], length: int) -> tuple[float, float]:
    """Seconds for one more token of a request's context: once for each request, and for each of its rows.

    Args:
        short, long: passes over CONTEXT tokens and over `length`, by rows of one request.
    """
    more = {rows: of_context_token(short[rows], taken, length - CONTEXT) for rows, taken in long.items()}
    if not more:
        return 0.0, 0.0
    one, most = min(more), max(more)
    of_row = max(0.0, more[most] - more[one]) / max(1, most - one)
    of_row = min(of_row, more[one])  # a further row costs at most as much as the first, which reads the context
    return more[one] - of_row, of_row


def _contexts(rows: int, entries: int) -> int:  # requests in a step of `rows` rows
    return 1 if rows <= ONE_BLOCK else min(rows, entries)


class _Bench:  # target and drafter over scratch caches with made-up contexts; each job returns seconds
    def __init__(self, target: TargetModel, drafter: Drafter, block_size: int, entries: int, context: int) -> None:
        self.entries, self.context, self.device = entries, context, target.device
        capacity = context + (IN_A_ROW + 3) * block_size
        self.speculator = _Speculator(drafter, target, block_size=block_size, max_batch_size=entries, capacity=capacity)
        self.static = self.speculator.drafter_runner.static
        policy, limits = FixedWidth(block_size), {"max_batch_size": entries, "capacity": capacity}
        self.scheduler = Scheduler(target, self.speculator, policy, **limits, reuse_prefixes=False, shared=None)
        for cache in (self.scheduler.cache, self.speculator.cache):  # the contexts are made up, and are read
            cache.keys.zero_()
            cache.values.zero_()

    def target_step(self, rows: int) -> Callable[[], float]:
        used = max(_contexts(rows, self.entries), ceil(rows / self.speculator.block_size))
        # spread evenly, as in a batch of blocks
        drafts = [[1] * (rows // used + (entry < rows % used) - 1) for entry in range(used)]

        def timed() -> float:
            scheduler, self.speculator.ready = self.scheduler, drafts
            scheduler.running = [_scratch_request(entry, self.context) for entry in range(used)]
            if not self.static:
                return _seconds(scheduler.step, self.device)
            scheduler.policy = FixedWidth(1 + len(drafts[0]))
            scheduler.step()  # the one after it is launched, too
            start = perf_counter()
            for _ in range(IN_A_ROW):
                scheduler.step()
            return (perf_counter() - start) / IN_A_ROW

        return timed

    def draft_pass(self, requests: int) -> Callable[[], float]:
        speculator, target = self.speculator, self.speculator.target
        gained = speculator.block_size // 2  # a typical number of new context rows
        shape = gained, speculator.drafter.config.feature_size

        def run() -> object:
            speculator.ready = None
            features = torch.ones(shape, dtype=target.embedding.dtype, device=target.device)
            scratch = [_scratch_request(entry, self.context, gained) for entry in range(requests)]
            for request in scratch:
                request.features.append(features)
            return speculator.draft(scratch, [speculator.block_size] * requests)

        return self._captured_drafts(requests) if self.static else lambda: _seconds(run, self.device)

    def _captured_drafts(self, requests: int) -> Callable[[], float]:
        speculator, block = self.speculator, self.speculator.block_size
        shape = self.scheduler.target_runner.shapes.fit([Span(0, self.context, block)] * requests)
        assert shape is not None
        table = to_device([[entry, self.context, 1] for entry in range(requests)], self.device)

        def work(table: Tensor) -> tuple[Tensor]:
            return (speculator.draft_blocks(table, shape),)

        def run() -> None:
            speculator.ready = None
            for _ in range(IN_A_ROW):
                speculator.drafter_runner.run(shape, "drafts", work, table)

        return lambda: _seconds(run, self.device) / IN_A_ROW


class _Speculator(Speculator):  # its drafts cost nothing while they are `ready`
    ready: Sequence[list[int]] | None = None

    def draft(self, requests: Sequence[Request], widths: Sequence[int]) -> list[list[int]]:
        return super().draft(requests, widths) if self.ready is None else list(self.ready)

    def draft_blocks(self, table: Tensor, shape: Shape) -> Tensor:
        if self.ready is None:
            return super().draft_blocks(table, shape)
        return table.new_ones(len(table), shape.width - 1)


SCRATCH_IDS = count()


def _scratch_request(entry: int, context: int, gained: int = 0) -> Request:
    return Request(
        id=next(SCRATCH_IDS),  # a step that was launched for another request is not read for this one
        entry=entry,
        token_ids=[1] * (context + gained + 1),
        prompt_length=1,
        limit=sys.maxsize,
        params=SamplingParams(temperature=0, ignore_eos=True),
        verified=context + gained,
        injected=context,
    )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - start


def _machine(device: torch.device) -> str:  # the device, its threads, and the way in which they wait
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    waiting = " ".join(os.environ[name] for name in CHOSEN_ALREADY if name in os.environ)
    return f"{processor()}, {torch.get_num_threads()} threads {waiting}".rstrip()


def _key(target: TargetModel, drafter: Drafter, block_size: int, entries: int) -> str:
    parts = [  # everything that changes the costs
        target.config.model_dump_json(),
        drafter.config.model_dump_json(),
        json.dumps(Calibration.model_json_schema()),
        "steps in a row" if target.device.type == "cuda" else "whole steps",
        f"{block_size} {entries} {target.embedding.dtype} {len(drafter.hot_tokens or [])}",
        f"{_machine(target.device)} {versions('torch', 'dflash-serve')} {target.operators.kernels}",
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


class DtypeSpeed(BaseModel):
    """Measured speed of bfloat16 over float32."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    faster: PositiveFloat


def choose_dtype(deployment: Deployment, device: str, *, compiled: bool) -> torch.dtype:
    """The requested dtype. `auto` is bfloat16 on a GPU, and on a CPU if it rounds no weight and was measured as faster.

    Raises:
        UserError: the target's folder has no usable weights.
    """
    asked = DTYPES.get(deployment.hardware.dtype)
    if asked is not None or device != "cpu":
        return asked or torch.bfloat16
    folder = target_folder(deployment.target.model, deployment.target.revision)
    if not is_stored_in_bfloat16(folder):
        return torch.float32
    config = read_target_config(folder)
    faster = _kept_dtype_speed(config.hidden_size, config.intermediate_size, compiled=compiled)
    chosen = torch.bfloat16 if faster >= WORTH else torch.float32
    log.info("%s: a layer of this target takes %.2f times as long in float32 as in bfloat16", chosen, faster)
    return chosen


def _kept_dtype_speed(inputs: int, outputs: int, *, compiled: bool) -> float:
    # measured once for each layer and machine: a restarted server keeps its dtype
    machine = f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    asked = f"{inputs} x {outputs}, {machine}, {kernels_id() if compiled else 'plain'}"
    path = cache_home() / "dtype" / f"{hashlib.sha256(asked.encode()).hexdigest()[:24]}.json"
    kept = read_record(path, DtypeSpeed)
    if kept is None:
        with doing("comparing bfloat16 with float32, once"):
            kept = DtypeSpeed(faster=measure_dtype_speed(inputs, outputs, compiled=compiled))
        keep_record(path, kept, otherwise="the speed of bfloat16 is measured again next time")
    return kept.faster


def measure_dtype_speed(inputs: int, outputs: int, *, compiled: bool) -> float:
    """Ratio of the times of a linear layer in float32 and in bfloat16; each is the least of its repetitions."""
    weight = torch.randn(outputs, inputs).bfloat16()
    layers: dict[torch.dtype, nn.Module] = {}
    for dtype in DTYPES.values():
        linear = nn.Linear(inputs, outputs, bias=False, device="meta")
        linear.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        layers[dtype] = pack_linear(linear, compiled=compiled)
    seconds = dict.fromkeys(layers, 0.0)
    for rows in DTYPE_ROWS:
        least = dict.fromkeys(layers, float("inf"))
        for _ in range(DTYPE_REPETITIONS):
            for dtype, layer in layers.items():
                x = torch.ones(rows, inputs, dtype=dtype)
                start = perf_counter()
                layer(x)
                least[dtype] = min(least[dtype], perf_counter() - start)
        seconds = {dtype: seconds[dtype] + least[dtype] for dtype in layers}
    return seconds[torch.float32] / seconds[torch.bfloat16]
