"""The cost table of this target and drafter on this machine: what the width policy decides by.

Measured in a second or two and kept in the cache, by everything that changes it. Noise only ever adds time, so each
figure is the least of its repetitions, and the repetitions are interleaved: a busy spell hits all row counts alike.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from pydantic import ValidationError

from dflash_serve.common.files import cache_home
from dflash_serve.models.kv_cache import Span
from dflash_serve.speculation.cost import CostModel
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics

from .request import Request
from .scheduler import Scheduler
from .speculator import Speculator

log = logging.getLogger(__name__)

CONTEXT = 128
"""Tokens of context while measuring: attention is a small part of a step at this size."""
REPETITIONS = 5


def cost_of(scheduler: Scheduler, speculator: Speculator) -> CostModel:
    """The cached cost table, or a fresh measurement. Call while nothing runs: it scribbles over the first entries."""
    path = cache_home() / "cost" / f"{_key(scheduler, speculator)}.json"
    try:
        return CostModel.model_validate_json(path.read_text())
    except (OSError, ValidationError):
        cost = measure(scheduler, speculator)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as scratch:
            scratch.write(cost.model_dump_json(indent=1))
        Path(scratch.name).rename(path)
    except OSError as error:  # it costs the next start two seconds, no more
        log.warning("%s: the cost table cannot be kept (%s); it is measured again next time", path, error.strerror)
    return cost


@torch.inference_mode()
def measure(scheduler: Scheduler, speculator: Speculator) -> CostModel:
    """Times a target pass by rows and a drafter pass by requests, up to full batches."""
    entries, block = len(scheduler.free_entries), speculator.block_size
    rows = sorted({*range(1, block + 1), *(n * block for n in _doubling(entries))})
    jobs: dict[tuple[str, int], Callable[[], object]] = {}
    for count in rows:
        jobs["target", count] = _target_pass(scheduler, count, min(count, entries))
    for requests in _doubling(entries):
        jobs["draft", requests] = _draft_pass(scheduler, speculator, requests)
    times = {job: [_seconds(work, scheduler.target.device) for _ in range(2)][1:] for job, work in jobs.items()}
    for _ in range(REPETITIONS - 1):
        for job, work in jobs.items():
            times[job].append(_seconds(work, scheduler.target.device))
    table: dict[str, dict[int, float]] = {"target": {}, "draft": {}}
    for (kind, count), seconds in times.items():
        table[kind][count] = min(seconds)
    return CostModel.model_validate(table)


def _doubling(limit: int) -> list[int]:
    return sorted({limit, *(2**i for i in range(limit.bit_length()) if 2**i <= limit)})


def _target_pass(scheduler: Scheduler, rows: int, entries: int) -> Callable[[], object]:
    """A pass over `rows` rows, spread evenly over entries as a batch of blocks would be; up to B rows in one entry."""
    used = 1 if rows <= 8 else entries
    spans = [Span(entry, CONTEXT, rows // used + (entry < rows % used)) for entry in range(used)]
    spans = [span for span in spans if span.length]
    token_ids = [[1] * span.length for span in spans]
    layer_ids = scheduler.speculator.target_layer_ids if scheduler.speculator else ()
    return lambda: scheduler.target.logits(scheduler.target_runner(token_ids, spans, layer_ids).hidden).argmax(-1)


def _draft_pass(scheduler: Scheduler, speculator: Speculator, requests: int) -> Callable[[], object]:
    width = speculator.drafter.config.feature_size
    gained = speculator.block_size // 2  # a typical number of rows to inject

    def run() -> object:
        features = torch.ones(gained, width, dtype=scheduler.target.embedding.dtype, device=scheduler.target.device)
        scratch = [_scratch_request(entry, gained) for entry in range(requests)]
        for request in scratch:
            request.features.append(features)
        return speculator.draft(scratch, [speculator.block_size] * requests)

    return run


def _scratch_request(entry: int, gained: int) -> Request:
    return Request(
        id=-1,
        entry=entry,
        token_ids=[1] * (CONTEXT + gained + 1),
        prompt_length=1,
        limit=0,
        params=SamplingParams(temperature=0),
        seed=0,
        statistics=AcceptanceStatistics(),
        verified=CONTEXT + gained,
        injected=CONTEXT,
    )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - start


def _key(scheduler: Scheduler, speculator: Speculator) -> str:
    device = scheduler.target.device
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    threads = "" if device.type == "cuda" else f"{torch.get_num_threads()} {os.environ.get('OMP_WAIT_POLICY', '')}"
    parts = [
        scheduler.target.config.model_dump_json(),
        speculator.drafter.config.model_dump_json(),
        f"{speculator.block_size} {len(scheduler.free_entries)} {scheduler.target.embedding.dtype}",
        f"{machine} {threads} {torch.__version__}",
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
