"""An embedded engine in miniature, with a drafter that is right as often as a test wants."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path

import torch

from dflash_serve.drafter.checkpoint import load_drafter
from dflash_serve.speculation.width import FixedWidth, WidthPolicy
from dflash_torch.decoder import Decoder
from dflash_torch.engine import EmbeddedEngine
from dflash_torch.passes import DrafterPass, TargetPass
from dflash_torch.sequence import Sequence
from dflash_torch.speculator import Speculator
from dflash_torch.target import load_target, load_tokenizer

PROMPTS = ["the quick brown fox", "the quick dog", '{"name": [1', "over", "fox fox fox lazy"]


class OracleSpeculator(Speculator):
    """Drafts what `truth` says comes after a prompt, with every `wrong_every`-th token spoilt."""

    truth: Mapping[tuple[int, ...], list[int]]
    wrong_every: int = 3

    def draft(self, sequences: Many[Sequence], widths: Many[int]) -> list[list[int]]:
        random = super().draft(sequences, widths)
        drafts = []
        for sequence, width, own in zip(sequences, widths, random, strict=True):
            prompt, done = tuple(sequence.token_ids[: sequence.prompt_length]), len(sequence.output_ids)
            known = self.truth.get(prompt, [])[done : done + width - 1]
            spoilt = [t if (done + k) % self.wrong_every else (t + 1) % 96 for k, t in enumerate(known, start=1)]
            drafts.append(own if sequence.grammar else spoilt + own[len(spoilt) :])
        return drafts


def with_passes(engine: EmbeddedEngine, *, static: bool) -> EmbeddedEngine:
    """The same engine with padded or ragged passes, whatever its device would choose."""
    decoder, speculator = engine.decoder, engine.decoder.speculator
    assert speculator is not None
    block = speculator.block_size
    decoder.verify = TargetPass(decoder.target, decoder.store, block, static=static)
    speculator.fill = DrafterPass(decoder.target.embedding, speculator.store, block, static=static)
    return engine


def tiny_engine(
    folders: tuple[Path, Path],
    *,
    width: int | WidthPolicy = 4,
    slots: int = 4,
    truth: Mapping[tuple[int, ...], list[int]] | None = None,
    reuse_prefixes: bool = True,
    prefill_rows: int = 1024,
    device: str = "cpu",
) -> EmbeddedEngine:
    """The pair of `write_tiny_pair`, running; width 1 = no speculator at all."""
    target = load_target(str(folders[0]), dtype=torch.float32, device=device)
    capacity = target.config.max_position_embeddings
    speculator: Speculator | None = None
    if width != 1:
        kind = Speculator if truth is None else OracleSpeculator
        drafter = load_drafter(folders[1], dtype=torch.float32, device=device)
        speculator = kind(drafter, target, block_size=drafter.config.block_size, slots=slots, capacity=capacity)
        if isinstance(speculator, OracleSpeculator):
            speculator.truth = truth or {}
    policy = FixedWidth(width) if isinstance(width, int) else width
    decoder = Decoder(
        target,
        speculator,
        policy,
        slots=slots,
        capacity=capacity,
        reuse_prefixes=reuse_prefixes,
        prefill_rows=prefill_rows,
    )
    return EmbeddedEngine(decoder, load_tokenizer(str(folders[0])))
