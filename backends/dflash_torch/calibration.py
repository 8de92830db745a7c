"""What steps cost on this device, measured in a second or two before serving starts.

Whole steps, but for their drafts: on a GPU a small model is a fraction of what its host does for a step.

It only seeds the width policy, which follows what steps really take. Noise only ever adds time, so each figure is the
least of its repetitions, and the repetitions are interleaved: a busy spell hits all row counts alike. The figures are
kept in the cache, by everything that changes them, with their spread; doubtful ones are measured again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from statistics import median
from time import perf_counter

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeFloat

from dflash_serve.common.files import cache_home, keep_record, read_record
from dflash_serve.common.provenance import now, processor, versions
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.target import TargetModel
from dflash_serve.speculation.costs import CostModel, is_confirmed
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.policy import FixedWidth
from dflash_serve.speculation.statistics import AcceptanceStatistics

from .request import Request
from .scheduler import Scheduler
from .shapes import sizes
from .speculator import Speculator
from .waiting import CHOSEN_ALREADY

CONTEXT, LONG_CONTEXT = 128, 1024
"""Tokens of context while measuring; the difference gives the price of a token of context."""
REPETITIONS, MOST_REPETITIONS = 5, 15
"""Of every step, and of those whose least time was not met twice."""
ONE_BLOCK = 8
"""Rows up to which they are all one request's."""
LEAST = 0.1
"""Of a pass: what is left of it, whatever the K/V of its contexts was found to cost."""
DOUBTFUL = 0.2
"""A measurement whose repetitions lie so far apart was made beside other work."""


class Calibration(BaseModel):
    """Costs as they were measured, and how well."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cost: CostModel
    spread: NonNegativeFloat
    """Of a typical figure: how far the median of its repetitions lies over the least of them."""
    measured: str
    machine: str
    versions: dict[str, str]


def cost_of(target: TargetModel, drafter: Drafter, block_size: int, entries: int) -> CostModel:
    """The cached costs of batches of up to `entries` requests, or a fresh measurement where they are doubtful."""
    path = cache_home() / "cost" / f"{_key(target, drafter, block_size, entries)}.json"
    kept = read_record(path, Calibration)
    if kept is not None and kept.spread <= DOUBTFUL:
        return kept.cost
    fresh = measure(target, drafter, block_size, entries)
    if kept is not None and kept.spread <= fresh.spread:
        return kept.cost
    keep_record(path, fresh, otherwise="the cost table is measured again next time")
    return fresh.cost


@torch.inference_mode()
def measure(target: TargetModel, drafter: Drafter, block_size: int, entries: int) -> Calibration:
    """Times steps by rows and a drafter pass by requests, up to full batches, over small caches of its own."""
    long = min(LONG_CONTEXT, target.config.max_position_embeddings - 2 * block_size)
    bench = _Bench(target, drafter, block_size, entries, CONTEXT)
    jobs: dict[tuple[str, int], Callable[[], object]] = {}
    for rows in sorted({*range(1, block_size + 1), *(n * block_size for n in sizes(1, entries))}):
        jobs["target", rows] = bench.target_step(rows, entries, CONTEXT)
    for requests in sizes(1, entries):
        jobs["draft", requests] = bench.draft_pass(requests, CONTEXT)
    if long > CONTEXT:
        alone = _Bench(target, drafter, block_size, 1, long)
        for rows in (1, min(block_size, ONE_BLOCK)):
            jobs["target_context", rows] = alone.target_step(rows, 1, long)
        jobs["draft_context", 1] = alone.draft_pass(1, long)
    times = {job: [_seconds(work, target.device) for _ in range(2)][1:] for job, work in jobs.items()}
    for turn in range(1, MOST_REPETITIONS):
        for job, work in jobs.items():
            if turn < REPETITIONS or not is_confirmed(times[job]):
                times[job].append(_seconds(work, target.device))
    least = {job: min(seconds) for job, seconds in times.items()}
    return Calibration(
        cost=tabulate(least, entries, long),
        spread=median(median(seconds) / min(seconds) - 1 for seconds in times.values()),
        measured=now(),
        machine=_machine(target.device),
        versions=versions("torch", "dflash-serve"),
    )


def tabulate(seconds: Mapping[tuple[str, int], float], entries: int, long: int) -> CostModel:
    """Passes over contexts of CONTEXT tokens, and some of one request's over `long`; what K/V costs is told apart."""
    tables: dict[str, dict[int, float]] = {"target": {}, "draft": {}, "target_context": {}, "draft_context": {}}
    for (kind, size), taken in seconds.items():
        tables[kind][size] = taken
    target, draft = tables["target"], tables["draft"]
    of_token, of_row = _slopes(target, tables["target_context"], long)
    of_draft = sum(_slopes(draft, tables["draft_context"], long))
    bare_target = {
        rows: max(LEAST * taken, taken - CONTEXT * (of_token * _contexts(rows, entries) + of_row * rows))
        for rows, taken in target.items()
    }
    bare_draft = {count: max(LEAST * taken, taken - CONTEXT * of_draft * count) for count, taken in draft.items()}
    return CostModel(
        target=bare_target,
        draft=bare_draft,
        target_context=of_token,
        draft_context=of_draft,
        target_attention=of_row,
    )


def _slopes(short: Mapping[int, float], long: Mapping[int, float], length: int) -> tuple[float, float]:
    """Seconds more for a token more of a request's context: once, and for each of its rows.

    Args:
        short, long: passes over CONTEXT tokens and over `length`, by rows of one request.
    """
    more = {rows: max(0.0, taken - short[rows]) / (length - CONTEXT) for rows, taken in long.items()}
    if not more:
        return 0.0, 0.0
    one, most = min(more), max(more)
    of_row = max(0.0, more[most] - more[one]) / max(1, most - one)
    of_row = min(of_row, more[one])  # a row more cannot take what one takes with all that is read
    return more[one] - of_row, of_row


def _contexts(rows: int, entries: int) -> int:
    """How many requests a step of so many rows is made of: one, as long as its block holds them."""
    return 1 if rows <= ONE_BLOCK else min(rows, entries)


class _Bench:
    """Target and drafter over caches of their own, with made-up contexts in them."""

    def __init__(self, target: TargetModel, drafter: Drafter, block_size: int, entries: int, context: int) -> None:
        capacity = context + 2 * block_size
        self.speculator = _FreeDrafts(drafter, target, block_size=block_size, max_batch_size=entries, capacity=capacity)
        self.scheduler = Scheduler(
            target,
            self.speculator,
            FixedWidth(block_size),
            max_batch_size=entries,
            capacity=capacity,
            reuse_prefixes=False,
        )

    def target_step(self, rows: int, entries: int, context: int) -> Callable[[], object]:
        """Rows spread evenly over entries as a batch of blocks would be; the drafts are there already."""
        used = max(_contexts(rows, entries), ceil(rows / self.speculator.block_size))
        drafts = [[1] * (rows // used + (entry < rows % used) - 1) for entry in range(used)]

        def run() -> object:
            self.speculator.ready = drafts
            self.scheduler.running = [_scratch_request(entry, context) for entry in range(used)]
            return self.scheduler.step()

        return run

    def draft_pass(self, requests: int, context: int) -> Callable[[], object]:
        """A draft for each of `requests` requests, a typical number of context rows injected before it."""
        speculator, target = self.speculator, self.speculator.target
        gained = speculator.block_size // 2
        shape = gained, speculator.drafter.config.feature_size

        def run() -> object:
            features = torch.ones(shape, dtype=target.embedding.dtype, device=target.device)
            scratch = [_scratch_request(entry, context, gained) for entry in range(requests)]
            for request in scratch:
                request.features.append(features)
            return Speculator.draft(speculator, scratch, [speculator.block_size] * requests)

        return run


class _FreeDrafts(Speculator):
    """Drafts that cost nothing."""

    ready: Sequence[list[int]] = ()

    def draft(self, requests: Sequence[Request], widths: Sequence[int]) -> list[list[int]]:
        return list(self.ready)


def _scratch_request(entry: int, context: int, gained: int = 0) -> Request:
    return Request(
        id=entry,
        entry=entry,
        token_ids=[1] * (context + gained + 1),
        prompt_length=1,
        limit=sys.maxsize,
        params=SamplingParams(temperature=0, ignore_eos=True),
        seed=0,
        statistics=AcceptanceStatistics(),
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


def _machine(device: torch.device) -> str:
    """The device and how it is used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    waiting = " ".join(os.environ[name] for name in CHOSEN_ALREADY if name in os.environ)
    return f"{processor()}, {torch.get_num_threads()} threads {waiting}".rstrip()


def _key(target: TargetModel, drafter: Drafter, block_size: int, entries: int) -> str:
    """A digest of everything that changes the costs."""
    parts = [
        target.config.model_dump_json(),
        drafter.config.model_dump_json(),
        json.dumps(Calibration.model_json_schema()),
        "whole steps",
        f"{block_size} {entries} {target.embedding.dtype} {len(drafter.hot_tokens or [])}",
        f"{_machine(target.device)} {versions('torch', 'dflash-serve')} {target.operators.kernels}",
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
