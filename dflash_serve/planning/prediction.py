"""Tokens/s from step times: one split of one pair under one load, at any batch and width.

    tokens/s/user = tau(w) / (step + prefill share);    tokens/s/GPU = batch x that / GPUs of the copy

Prefill share: while a batch decodes, lam = batch x tau / OSL prompts arrive a step, in Poisson batches: a step is
interrupted with probability 1 - e^-lam, for a prefill of lam / (1 - e^-lam) prompts and the engine's own step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp

from dflash_serve.planning.acceptance import ExpectedAcceptance
from dflash_serve.planning.constants import Constants
from dflash_serve.planning.step_times import Milliseconds, Split, StepTimes
from dflash_serve.speculation.allocation import choose_widths
from dflash_serve.speculation.costs import CostModel

WHOLE = Split()
"""A copy on one GPU."""
MANY = 4
"""Prompts of the larger prefill; between one and so many it is taken as linear, and beyond."""
LEAST = 1e-6


@dataclass(frozen=True)
class Load:
    """What requests are like: means, in tokens."""

    isl: int
    """Prompt."""
    osl: int
    """Answer."""

    @property
    def context(self) -> int:
        """Tokens before a step, on average."""
        return self.isl + self.osl // 2


@dataclass(frozen=True)
class OperatingPoint:
    """One way of running, and what it gives."""

    variant: str
    """`off`, `fixed B` or `auto`."""
    split: Split
    batch: int
    width: int
    acceptance_length: float
    step: Milliseconds
    """A whole step, its share of prefills included."""
    interactivity: float
    """Tokens/s that one user sees."""
    throughput: float
    """Tokens/s/GPU."""
    first_token_ms: float
    """From arrival to first token, with a place free in the batch: half a step's wait and the prefill."""


@dataclass(frozen=True)
class Predictor:
    """Prices points of one split."""

    times: StepTimes
    constants: Constants
    load: Load
    block_size: int
    split: Split = WHOLE

    def step(self, batch: int, width: int) -> Milliseconds:
        """A step without prefills; width 1 = without speculation."""
        own, scale = self.constants.of_step(batch, speculates=width > 1), self.constants.scale
        return (self._verified(batch, width) + self._drafted(batch, width)).times(scale) + own

    def _verified(self, batch: int, width: int) -> Milliseconds:
        return self.times.verify(batch, width, self.load.context)

    def _drafted(self, batch: int, width: int) -> Milliseconds:
        return self.times.draft(batch, self.block_size, self.load.context) if width > 1 else Milliseconds()

    @cached_property
    def _prefills(self) -> tuple[Milliseconds, Milliseconds]:
        return self.times.prefill(1, self.load.isl), self.times.prefill(MANY, self.load.isl)

    def prefill(self, prompts: float) -> Milliseconds:
        """One pass over so many prompts; the engine's own time is in it."""
        one, many = self._prefills
        more = (many + one.times(-1)).times((prompts - 1) / (MANY - 1))
        return (one + more).times(self.constants.scale) + self.constants.of_step(0, speculates=False)

    def prefill_share(self, arriving: float) -> Milliseconds:
        """What a step pays on average for `arriving` prompts a step."""
        interrupted = 1 - exp(-arriving)
        return self.prefill(arriving / interrupted).times(interrupted)

    def point(
        self, variant: str, batch: int, width: int, tokens: float, step: Milliseconds | None = None
    ) -> OperatingPoint:
        """What a batch gives that gains `tokens` a request and step."""
        step = step or self.step(batch, width)
        whole = step + self.prefill_share(batch * tokens / self.load.osl)
        user = 1e3 * tokens / whole.total
        first = step.total / 2 + self.prefill(1).total
        return OperatingPoint(
            variant, self.split, batch, width, tokens, whole, user, user * batch / self.split.tensor, first
        )

    def curve(
        self, variant: str, batches: Sequence[int], width: int, acceptance: ExpectedAcceptance
    ) -> list[OperatingPoint]:
        """One width at every batch. A larger batch that is cheaper is noise: the smaller costs no more."""
        steps = [self.step(batch, width) for batch in batches]
        for place in range(len(steps) - 2, -1, -1):
            steps[place] = min(steps[place], steps[place + 1], key=lambda each: each.total)
        tokens = acceptance.length(width)
        return [self.point(variant, b, width, tokens, step) for b, step in zip(batches, steps, strict=True)]

    def auto(self, batch: int, widths: Sequence[int], acceptance: ExpectedAcceptance) -> int:
        """The width that our own policy would choose for such a batch, were these its costs."""
        survival = acceptance.survival[: self.block_size - 1]
        wide = [width for width in widths if width > 1]
        return choose_widths([survival] * batch, self._cost_of_batch(batch, wide), allowed_widths=wide)[0]

    def _cost_of_batch(self, batch: int, widths: Sequence[int]) -> CostModel:
        """Seconds of this batch alone, the context in them."""
        scale = self.constants.scale
        plain, own = (self.constants.of_step(batch, speculates=each).total for each in (False, True))
        target = {batch * width: (scale * self._verified(batch, width).total + plain) / 1e3 for width in (1, *widths)}
        draft = scale * self._drafted(batch, max(widths)).total + own - plain
        return CostModel(target=target, draft={batch: max(LEAST, draft / 1e3)})

    def cost_model(self, batch: int, widths: Sequence[int]) -> CostModel:
        """What `width: auto` may start from on a server of at most `batch` requests, before it has measured.

        The engine's milliseconds a request, which a table over rows cannot hold, are those of a full batch.
        """
        scale, context = self.constants.scale, self.load.context
        plain, own = (self.constants.of_step(batch, speculates=each).total for each in (False, True))
        rows = sorted({count * width for count in _doubled(batch) for width in (1, *widths)})
        requests = _doubled(batch)
        verify, draft, block = self.times.verify, self.times.draft, self.block_size
        further = verify(batch, 1, 2 * context).total - verify(batch, 1, context).total
        drafted = draft(batch, block, 2 * context).total - draft(batch, block, context).total
        return CostModel(
            target={r: round((scale * verify(1, r, 1).total + plain) / 1e3, 7) for r in rows},
            draft={b: round(max(LEAST, (scale * draft(b, block, 1).total + own - plain) / 1e3), 7) for b in requests},
            target_context=max(0.0, scale * further / (batch * context) / 1e3),
            draft_context=max(0.0, scale * drafted / (batch * context) / 1e3),
        )


def _doubled(most: int) -> list[int]:
    """1, 2, 4, ... and the last one itself."""
    return sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})
