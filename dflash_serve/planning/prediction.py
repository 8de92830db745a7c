"""Tokens/s from step times: one split of one pair under one load, at any batch and width.

    tokens/s/user = tau(w) / (step + prefill share);    tokens/s/GPU = batch x that / GPUs of the copy

Prefill share: while a batch decodes, lam = batch x tau / OSL prompts arrive a step, in Poisson batches: a step is
interrupted with probability 1 - e^-lam, for a prefill of lam / (1 - e^-lam) prompts and the engine's own step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from math import exp, log
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, ValidationError

from dflash_serve.common.documents import read_text
from dflash_serve.common.extras import import_extra
from dflash_serve.common.settings import Frozen, describe
from dflash_serve.errors import UserError, did_you_mean
from dflash_serve.planning.step_times import Chain, Milliseconds, Split, StepTimes
from dflash_serve.speculation.allocation import choose_widths
from dflash_serve.speculation.costs import CostModel

WHOLE = Split()  # A copy on one GPU
MANY = 4  # Prompts of the larger prefill; between one and so many it is taken as linear, and beyond
LEAST = 1e-6  # Milliseconds of a draft at least: a cost table takes no zero


@dataclass(frozen=True)
class ExpectedAcceptance:
    """Survival of slots 1..B-1, and where it comes from."""

    name: str
    survival: tuple[float, ...]
    source: str

    def length(self, width: int) -> float:
        """Tokens gained a step at that width, the bonus token counted."""
        return 1 + sum(self.survival[: width - 1])


@dataclass(frozen=True)
class Load:
    """Mean lengths of requests, in tokens."""

    isl: int  # Prompt
    osl: int  # Answer

    @property
    def context(self) -> int:
        """Tokens before a step, on average."""
        return self.isl + self.osl // 2


class Constants(Frozen):
    """Own time of one engine in one mode, in milliseconds:

    plain step = scale * verify(b, 1) + plain_step + plain_request * b
    speculative step = scale * (verify(b, w) + draft(b, B)) + speculative_step + speculative_request * b
    """

    name: str
    backend: str
    engine_version: str
    attention_backend: str
    overlap: bool  # The engine prepares a step while the one before it runs
    tables: str  # The engine whose operator tables these belong to
    scale: PositiveFloat = 1.0
    plain_step: NonNegativeFloat
    speculative_step: NonNegativeFloat
    plain_request: NonNegativeFloat
    speculative_request: NonNegativeFloat
    chain_pass: NonNegativeFloat = 0.14
    """A drafter that drafts one token after another (EAGLE-3, MTP) adds this to each pass but the first. One value for
    every engine, fitted to 15 published cells of SGLang (plan-published.json)."""
    evidence: Literal["fitted", "implied", "assumed", "calibrated"]
    """fitted: to published or measured rows; implied: by a few cells; assumed: bounded by cross-checks alone;
    calibrated: to a measurement of the user's."""
    source: str  # The rows that were fitted, or another origin
    plain_error: Annotated[float, Field(gt=0, lt=1)]
    """Mean relative error of tokens/s without speculation, where it was held against measurements."""
    error: Annotated[float, Field(gt=0, lt=1)]
    """Mean relative error with speculation, on targets, engines or GPUs outside the fit where there are any."""

    def of_step(self, batch: int, *, speculates: bool) -> Milliseconds:
        """The engine's part of a step."""
        step, request = (
            (self.speculative_step, self.speculative_request) if speculates else (self.plain_step, self.plain_request)
        )
        return Milliseconds(constants=step + request * batch)


def constants_of(backend: str, asked: str | None) -> Constants:
    """The constants of a backend.

    Args:
        asked: the name of a known set, or a JSON file of one; None = the backend's first.

    Raises:
        UserError: nothing is known of this engine, there is no such set, or the file is none.
    """
    if asked is not None and Path(asked).suffix == ".json":
        found = _read_constants(Path(asked))
        if found.backend != backend:
            what, do = f"constants of {found.backend}, and the plan is for {backend}", f"give those of {backend}"
            raise UserError(what, where=f"--constants {asked}", do=f"{do}, or --backend {found.backend}")
        return found
    every = known_constants()
    known = {each.name: each for each in every if each.backend == backend}
    if asked is None and not known:
        what = f"nothing is known of how long {backend} takes between kernels"
        have = ", ".join(dict.fromkeys(each.backend for each in every))
        raise UserError(what, where=f"--backend {backend}", do=f"use one of {have}, or give --constants a JSON file")
    if asked is not None and asked not in known:
        have = f"known of {backend} are: {', '.join(known) or 'none'}; or give a JSON file"
        raise UserError(f"no constants {asked!r}", where="--constants", do=did_you_mean(asked, known) or have)
    return next(iter(known.values())) if asked is None else known[asked]


def known_constants() -> list[Constants]:
    """Sets that come with this package; the first of a backend is its default."""
    sets = json.loads((files(__package__) / "constants.json").read_text(encoding="utf-8"))["sets"]
    return [Constants.model_validate(each) for each in sets]


def _read_constants(path: Path) -> Constants:
    try:
        return Constants.model_validate_json(read_text(path))
    except ValidationError as error:
        do = "give one object, such as those in dflash_serve/planning/constants.json"
        raise UserError(f"no constants ({describe(error)})", where=str(path), do=do) from None


@dataclass(frozen=True)
class OperatingPoint:
    """A variant at one split, batch and width, with its predicted figures."""

    variant: str  # `off`, `fixed B` or `auto`
    split: Split
    batch: int
    width: int
    acceptance_length: float
    step: Milliseconds  # A whole step, its share of prefills included
    interactivity: float  # Tokens/s that one user sees
    throughput: float  # Tokens/s/GPU
    first_token_ms: float
    """From arrival to first token, with a place free in the batch: half a step's wait and the prefill."""


@dataclass(frozen=True)
class Predictor:
    """Predicts operating points of one split."""

    times: StepTimes
    constants: Constants
    load: Load
    block_size: int
    split: Split = WHOLE
    chain: Chain | None = None  # It drafts instead of the pair's drafter: as many tokens as are verified

    def step(self, batch: int, width: int) -> Milliseconds:
        """A step without prefills; width 1 = without speculation."""
        own, scale = self.constants.of_step(batch, speculates=width > 1), self.constants.scale
        if self.chain is not None and width > 2:
            own += Milliseconds(constants=self.constants.chain_pass * (width - 2))
        return (self._verified(batch, width) + self._drafted(batch, width)).times(scale) + own

    def _verified(self, batch: int, width: int) -> Milliseconds:
        return self.times.verify(batch, width, self.load.context)

    def _drafted(self, batch: int, width: int) -> Milliseconds:
        if self.chain is not None and width > 1:
            return self.times.chain(self.chain, batch, width, self.load.context)
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
        """Mean prefill time in a step, for `arriving` prompts a step."""
        interrupted = 1 - exp(-arriving)
        return self.prefill(arriving / interrupted).times(interrupted)

    def point(
        self, variant: str, batch: int, width: int, tokens: float, step: Milliseconds | None = None
    ) -> OperatingPoint:
        """The operating point of a batch whose requests each gain `tokens` a step."""
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
        """The width that the width policy chooses for such a batch at these costs."""
        survival = acceptance.survival[: self.block_size - 1]
        wide = [width for width in widths if width > 1]
        return choose_widths([survival] * batch, self._cost_of_batch(batch, wide), allowed_widths=wide)[0]

    def _cost_of_batch(self, batch: int, widths: Sequence[int]) -> CostModel:
        # Seconds of this batch alone, context included.
        scale = self.constants.scale
        plain, own = (self.constants.of_step(batch, speculates=each).total for each in (False, True))
        target = {batch * width: (scale * self._verified(batch, width).total + plain) / 1e3 for width in (1, *widths)}
        draft = scale * self._drafted(batch, max(widths)).total + own - plain
        return CostModel(target=target, draft={batch: max(LEAST, draft / 1e3)})

    def cost_model(self, batch: int, widths: Sequence[int]) -> CostModel:
        """Cost table for `width: auto` on a server of at most `batch` requests, used before it has measured.

        A table over rows cannot hold the engine's milliseconds a request; those of a full batch are taken.
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
    return sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})


FITTED = ("plain_step", "plain_request", "speculative_step", "speculative_request")
"""Constants that a fit finds, where it is not told others."""


@dataclass(frozen=True)
class MeasuredCell:
    """One measurement: so many requests at once, at one width, and the tokens/s that they saw together."""

    predictor: Predictor  # Its constants are not used
    batch: int
    width: int
    tokens: float  # Gained a request and step
    rate: float  # Tokens/s of one server
    label: str = ""

    def predicted(self, constants: Constants) -> float:
        """Tokens/s with these constants."""
        predictor = replace(self.predictor, constants=constants)
        return self.batch * predictor.point("", self.batch, self.width, self.tokens).interactivity

    def error(self, constants: Constants) -> float:
        """Relative error of the prediction; positive = predicted too fast."""
        return self.predicted(constants) / self.rate - 1


def fit(cells: Sequence[MeasuredCell], start: Constants, free: Sequence[str] = FITTED) -> Constants:
    """The constants, none negative, with the least relative errors; outliers beyond 10 % count less (soft L1).

    Args:
        start: where the search begins; what is not in `free` stays as it is there.

    Raises:
        UserError: scipy is not installed.
    """

    def set_to(values: Sequence[float]) -> Constants:
        return start.model_copy(update={name: float(value) for name, value in zip(free, values, strict=True)})

    def residuals(values: Sequence[float]) -> list[float]:
        constants = set_to(values)
        return [log(cell.predicted(constants) / cell.rate) for cell in cells]

    first = [max(1e-3, getattr(start, name)) for name in free]
    search = import_extra("plan", "scipy.optimize").least_squares
    found = search(residuals, first, bounds=(0, float("inf")), loss="soft_l1", f_scale=0.1)
    return set_to([round(float(value), 4) for value in found.x])
