"""An embedded engine in miniature, with a drafter that is right as often as a test wants."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dflash_serve.backend import Engine, Prompt, RequestOutput
from dflash_serve.models.loader import load_drafter, load_target, load_tokenizer
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.policy import FixedWidth, WidthPolicy
from dflash_torch.engine import EmbeddedEngine
from dflash_torch.model_runner import DrafterRunner, Shape, TargetRunner
from dflash_torch.request import Request
from dflash_torch.scheduler import Scheduler
from dflash_torch.speculator import Speculator

DEVICE = os.environ.get("DFLASH_SERVE_TEST_DEVICE", "cpu")
"""Where the miniature runs; what holds on a CPU must hold on `cuda`."""
PROMPTS = ["the quick brown fox", "the quick dog", '{"name": [1', "over", "fox fox fox lazy"]


class OracleSpeculator(Speculator):
    """Drafts what `truth` says comes after a prompt, with every `wrong_every`-th token spoilt."""

    truth: Mapping[tuple[int, ...], list[int]]
    wrong_every: int = 3

    def draft(self, requests: Sequence[Request], widths: Sequence[int]) -> list[list[int]]:
        random = super().draft(requests, widths)
        done = [len(request.output_ids) for request in requests]
        return [self._spoilt(*each) for each in zip(requests, done, random, strict=True)]

    def draft_blocks(self, requests: Sequence[Request], table: Tensor, shape: Shape, slots: int) -> Tensor:
        random = super().draft_blocks(requests, table, shape, slots).tolist()
        starts = table[:, 1].tolist()
        done = [start + 1 - request.prompt_length for start, request in zip(starts, requests, strict=True)]
        drafts = [self._spoilt(*each) for each in zip(requests, done, random, strict=True)]
        return torch.tensor(drafts, device=table.device)

    def _spoilt(self, request: Request, done: int, own: list[int]) -> list[int]:
        known = self.truth.get(tuple(request.token_ids[: request.prompt_length]), [])[done : done + len(own)]
        spoilt = [t if (done + k) % self.wrong_every else (t + 1) % 96 for k, t in enumerate(known, start=1)]
        return own if request.grammar else spoilt + own[len(spoilt) :]


def answers(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
) -> list[RequestOutput]:
    """The finished requests of one stream; `params` for all of them or one each."""
    stream = engine.stream(prompts, [params] * len(prompts) if isinstance(params, SamplingParams) else params)
    for _ in stream:
        pass
    return stream.outputs()


def with_passes(engine: EmbeddedEngine, *, static: bool) -> EmbeddedEngine:
    """The same engine with padded or ragged passes, whatever its device would choose."""
    scheduler, speculator = engine.scheduler, engine.scheduler.speculator
    assert speculator is not None
    block = speculator.block_size
    scheduler.target_runner = TargetRunner(scheduler.target, scheduler.cache, block, static=static)
    speculator.drafter_runner = DrafterRunner(scheduler.target.embedding, speculator.cache, block, static=static)
    return engine


def tiny_engine(
    folders: tuple[Path, Path],
    *,
    width: int | WidthPolicy = 4,
    max_batch_size: int = 4,
    truth: Mapping[tuple[int, ...], list[int]] | None = None,
    reuse_prefixes: bool = True,
    prefill_rows: int = 1024,
    device: str = DEVICE,
    dtype: torch.dtype = torch.float32,
) -> EmbeddedEngine:
    """The pair of `write_tiny_pair`, running; width 1 = no speculator at all."""
    target = load_target(str(folders[0]), dtype=dtype, device=device)
    capacity = target.config.max_position_embeddings
    speculator: Speculator | None = None
    if width != 1:
        kind = Speculator if truth is None else OracleSpeculator
        drafter = load_drafter(folders[1], dtype=dtype, device=device)
        block = drafter.config.block_size
        speculator = kind(drafter, target, block_size=block, max_batch_size=max_batch_size, capacity=capacity)
        if isinstance(speculator, OracleSpeculator):
            speculator.truth = truth or {}
    policy = FixedWidth(width) if isinstance(width, int) else width
    scheduler = Scheduler(
        target,
        speculator,
        policy,
        max_batch_size=max_batch_size,
        capacity=capacity,
        reuse_prefixes=reuse_prefixes,
        prefill_rows=prefill_rows,
    )
    return EmbeddedEngine(scheduler, load_tokenizer(str(folders[0])))
