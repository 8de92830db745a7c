"""A Deployment to a running engine: load, measure what passes cost here, choose the widths by it.

The cost table is measured in a second or two and kept in the cache, by everything that changes it. Noise only ever
adds time, so each figure is the least of its repetitions, and the repetitions are interleaved: a busy spell hits all
row counts alike.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from time import perf_counter

import torch
from pydantic import ValidationError

from dflash_serve.common.files import cache_home, write_whole
from dflash_serve.common.provenance import processor
from dflash_serve.deployment import Deployment
from dflash_serve.deployment_checks import uses_drafter
from dflash_serve.errors import UserError
from dflash_serve.models.drafter import Drafter
from dflash_serve.models.fused import FusedDrafter
from dflash_serve.models.kv_cache import Span
from dflash_serve.models.loader import load_drafter, load_target, load_tokenizer
from dflash_serve.models.target import TargetModel
from dflash_serve.speculation.allocation import CostModel
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics
from dflash_serve.speculation.width import AutoWidth, FixedWidth, WidthPolicy

from .engine import EmbeddedEngine
from .model_runner import TargetRunner
from .request import Request
from .scheduler import Scheduler
from .speculator import Speculator

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CONTEXT = 128
"""Tokens of context while measuring: attention is a small part of a step at this size."""
REPETITIONS = 5


def start_engine(deployment: Deployment) -> EmbeddedEngine:
    """Loads and starts what `EmbeddedBackend.check` has passed; its `limits.max_batch_size` is filled in."""
    model, entries = deployment.target, deployment.limits.max_batch_size
    assert entries is not None
    dtype = DTYPES.get(deployment.hardware.dtype)
    target = load_target(model.model, dtype=dtype, device=_device(deployment), revision=model.revision)
    target.pack()
    capacity = deployment.limits.max_model_len or target.config.max_position_embeddings
    speculator: Speculator | None = None
    policy: WidthPolicy = FixedWidth(1)
    if uses_drafter(deployment):
        drafter = _drafter(deployment, target)
        block_size = deployment.speculation.block_size or drafter.config.block_size
        speculator = Speculator(drafter, target, block_size=block_size, max_batch_size=entries, capacity=capacity)
        policy = _policy(deployment, speculator, entries)
    scheduler = Scheduler(target, speculator, policy, max_batch_size=entries, capacity=capacity)
    return EmbeddedEngine(scheduler, load_tokenizer(model.model, model.revision))


def _device(deployment: Deployment) -> str:
    """The GPU where there is one, unless the deployment says `gpu: none`."""
    gpu = deployment.hardware.gpu
    if gpu not in (None, "none") and not torch.cuda.is_available():
        raise UserError(
            f"{gpu} is asked for, but PyTorch sees no GPU", where="hardware.gpu", do="run it there, or none"
        )
    return "cpu" if gpu == "none" or not torch.cuda.is_available() else "cuda"


def _drafter(deployment: Deployment, target: TargetModel) -> FusedDrafter:
    assert deployment.drafter is not None
    model, revision = deployment.drafter.model, deployment.drafter.revision
    return FusedDrafter(load_drafter(model, revision=revision, dtype=target.embedding.dtype, device=target.device))


def _policy(deployment: Deployment, speculator: Speculator, entries: int) -> WidthPolicy:
    width = deployment.speculation.width
    if isinstance(width, int):
        return FixedWidth(width)
    cost = cost_of(speculator.target, speculator.drafter, speculator.block_size, entries)
    return AutoWidth(cost, speculator.block_size)


def cost_of(target: TargetModel, drafter: Drafter, block_size: int, entries: int) -> CostModel:
    """The cached cost table of batches of up to `entries` requests, or a fresh measurement."""
    path = cache_home() / "cost" / f"{_key(target, drafter, block_size, entries)}.json"
    try:
        return CostModel.model_validate_json(path.read_text())
    except (OSError, ValidationError):
        cost = measure(target, drafter, block_size, entries)
    try:
        write_whole(path, cost.model_dump_json(indent=1))
    except UserError as error:  # it costs the next start two seconds, no more
        log.warning("the cost table is measured again next time: %s", error)
    return cost


@torch.inference_mode()
def measure(target: TargetModel, drafter: Drafter, block_size: int, entries: int) -> CostModel:
    """Times a target pass by rows and a drafter pass by requests, up to full batches, over small caches of its own."""
    capacity = 2 * CONTEXT + block_size
    speculator = Speculator(drafter, target, block_size=block_size, max_batch_size=entries, capacity=capacity)
    runner = TargetRunner(target, target.new_cache(entries, capacity + block_size), block_size)
    rows = sorted({*range(1, block_size + 1), *(n * block_size for n in _doubling(entries))})
    jobs: dict[tuple[str, int], Callable[[], object]] = {}
    for count in rows:
        jobs["target", count] = _target_pass(runner, count, min(count, entries), speculator.target_layer_ids)
    for requests in _doubling(entries):
        jobs["draft", requests] = _draft_pass(speculator, requests)
    times = {job: [_seconds(work, target.device) for _ in range(2)][1:] for job, work in jobs.items()}
    for _ in range(REPETITIONS - 1):
        for job, work in jobs.items():
            times[job].append(_seconds(work, target.device))
    table: dict[str, dict[int, float]] = {"target": {}, "draft": {}}
    for (kind, count), seconds in times.items():
        table[kind][count] = min(seconds)
    return CostModel.model_validate(table)


def _doubling(limit: int) -> list[int]:
    return sorted({limit, *(2**i for i in range(limit.bit_length()) if 2**i <= limit)})


def _target_pass(runner: TargetRunner, rows: int, entries: int, layer_ids: tuple[int, ...]) -> Callable[[], object]:
    """A pass over `rows` rows, spread evenly over entries as a batch of blocks would be; up to 8 rows in one entry."""
    used = 1 if rows <= 8 else entries
    spans = [Span(entry, CONTEXT, rows // used + (entry < rows % used)) for entry in range(used)]
    spans = [span for span in spans if span.length]
    token_ids = [[1] * span.length for span in spans]
    return lambda: runner.target.logits(runner(token_ids, spans, layer_ids).hidden).argmax(-1)


def _draft_pass(speculator: Speculator, requests: int) -> Callable[[], object]:
    """A draft for each of `requests` requests, a typical number of context rows injected before it."""
    gained, target = speculator.block_size // 2, speculator.target
    shape = gained, speculator.drafter.config.feature_size

    def run() -> object:
        features = torch.ones(shape, dtype=target.embedding.dtype, device=target.device)
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


def _key(target: TargetModel, drafter: Drafter, block_size: int, entries: int) -> str:
    """A digest of everything that changes the costs."""
    device = target.device
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    threads = "" if device.type == "cuda" else f"{torch.get_num_threads()} {os.environ.get('OMP_WAIT_POLICY', '')}"
    parts = [
        target.config.model_dump_json(),
        drafter.config.model_dump_json(),
        f"{block_size} {entries} {target.embedding.dtype}",
        f"{machine} {threads} {torch.__version__}",
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
