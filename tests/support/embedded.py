"""An embedded engine in miniature, with a drafter that is right as often as a test wants."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dflash_serve.answers.engine import Engine, Prompt, RequestOutput
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
    known: Tensor  # int64 [entries, capacity]: the drafts of each position, -1 = the drafter's own

    def draft(self, requests: Sequence[Request], widths: Sequence[int]) -> list[list[int]]:
        own = super().draft(requests, widths)
        return [draft if r.grammar else self._said(r, draft) for r, draft in zip(requests, own, strict=True)]

    def inject(self, requests: Sequence[Request]) -> None:
        for request in requests:
            said = self._spoilt(request)
            self.known[request.entry] = -1
            self.known[request.entry, request.prompt_length : request.prompt_length + len(said)] = torch.tensor(said)
        super().inject(requests)

    def draft_blocks(self, table: Tensor, shape: Shape) -> Tensor:
        own = super().draft_blocks(table, shape)
        known = self.known[table[:, :1], table[:, 1:2] + 1 + torch.arange(own.shape[1], device=own.device)]
        return torch.where(known < 0, own, known)

    def _said(self, request: Request, own: list[int]) -> list[int]:
        said = self._spoilt(request)[len(request.output_ids) :][: len(own)]
        return said + own[len(said) :]

    def _spoilt(self, request: Request) -> list[int]:
        answer = self.truth.get(tuple(request.token_ids[: request.prompt_length]), [])
        return [t if n % self.wrong_every else (t + 1) % 96 for n, t in enumerate(answer, start=1)]


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
            speculator.known = torch.full((speculator.cache.entries, speculator.cache.capacity), -1, device=device)
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
