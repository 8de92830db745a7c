"""What a drafter is worth on given prompts, through the real decoding loop."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many

import torch

from dflash_serve.backend import Prompt
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics
from dflash_serve.speculation.width import FixedWidth

from .controls import ControlSpeculator
from .decoder import Decoder
from .engine import EmbeddedEngine


class Evaluation:
    """Runs prompts at a fixed width, in batches: acceptance does not depend on who shares a batch.

    Args:
        engine: an engine that speculates.
        width: slots verified a step.
    """

    def __init__(self, engine: EmbeddedEngine, width: int) -> None:
        self.engine, self.width = engine, width

    def run(
        self, prompts: Many[Prompt], params: SamplingParams, control: str | None = None
    ) -> Iterator[AcceptanceStatistics]:
        """The statistics of each prompt, as they finish; under one of `controls.CONTROLS` if named."""
        torch.manual_seed(0)  # for the shuffles
        full = self.engine.decoder
        assert full.speculator is not None
        speculator = full.speculator if control is None else ControlSpeculator.under(control, full.speculator)
        decoder = Decoder(
            full.target,
            speculator,
            FixedWidth(self.width),
            slots=full.store.slots,
            capacity=full.capacity,
            reuse_prefixes=False,
        )
        engine = EmbeddedEngine(decoder, self.engine.tokenizer)
        for chunk in engine.stream(prompts, [params] * len(prompts)):
            if chunk.finish_reason is not None:
                yield engine.outputs_by_index[chunk.index].statistics
