"""What a drafter is worth on given prompts, through the real decoding loop."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence

from dflash_serve.backend import Prompt
from dflash_serve.outputs import RequestOutput
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import AcceptanceStatistics
from dflash_serve.speculation.width import FixedWidth

from .engine import EmbeddedEngine
from .faults.fault import Fault
from .scheduler import Scheduler


class Evaluation:
    """Runs prompts at a fixed width, in batches: acceptance does not depend on who shares a batch.

    Args:
        engine: an engine that speculates.
        width: slots verified a step.
    """

    def __init__(self, engine: EmbeddedEngine, width: int) -> None:
        self.engine, self.width = engine, width

    def run(
        self, prompts: Sequence[Prompt], params: SamplingParams, fault: Fault | None = None
    ) -> Iterator[AcceptanceStatistics]:
        """The statistics of each prompt, as they finish; under a fault if one is given."""
        for _, output in self.outputs(prompts, params, fault):
            yield output.statistics

    def outputs(
        self, prompts: Sequence[Prompt], params: SamplingParams, fault: Fault | None = None
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Index and answer of each prompt, as they finish; a fault changes the drafts and no answer."""
        full = self.engine.scheduler
        assert full.speculator is not None
        scheduler = Scheduler(
            full.target,
            full.speculator if fault is None else fault.change(full.speculator),
            FixedWidth(self.width),
            max_batch_size=full.cache.entries,
            capacity=full.capacity,
            reuse_prefixes=False,
        )
        stream = EmbeddedEngine(scheduler, self.engine.tokenizer).stream(prompts, [params] * len(prompts))
        finished: list[int] = []
        for chunk in stream:
            if chunk.finish_reason is not None:
                insort(finished, chunk.index)
                yield chunk.index, stream.outputs()[finished.index(chunk.index)]
