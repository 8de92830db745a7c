"""A decoding loop without models: requests whose acceptance is known, steps whose costs are known.

A batch has N lanes; a lane serves one request after another. For every token of a lane it is fixed how many drafted
tokens of a whole block behind it would be accepted, whatever the widths before: so all policies meet the same luck.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Protocol

import numpy as np

from dflash_serve.speculation.allocation import choices_of
from dflash_serve.speculation.costs import Context, CostModel, Floats, Integers
from dflash_serve.speculation.policy import FixedWidth, Step, WidthPolicy

DATA = Path(__file__).with_name("policy")
STEPS = 500
SERVER = "SGLang's server on cpu"
NOISE = 0.04
"""Spread of one step's time, of the logarithm; one step in 200 takes three times as long."""


@dataclass(frozen=True)
class Surface:
    """What steps cost in truth: a cost model, and an engine's own work: milliseconds a step, and a step and request."""

    name: str
    cost: CostModel
    block_size: int
    plain: tuple[float, float] = (0.0, 0.0)
    speculative: tuple[float, float] = (0.0, 0.0)
    widths: tuple[int, ...] | None = None
    """An engine that gives all requests of a step the same one of these; None = to each its own."""

    def of_steps(self, rows: Integers, drafted: Integers, requests: int, context_tokens: int) -> Floats:
        """Seconds of steps, [M]."""
        plain, speculative = ((each + per * requests) / 1e3 for each, per in (self.plain, self.speculative))
        engine = np.where(drafted > 0, speculative, plain)
        return self.cost.of_steps(rows, drafted, Context(context_tokens, requests)) + engine

    def measured(self, requests: int, chance: np.random.Generator) -> CostModel:
        """As a start-up calibration beside other work has it: 4 % off from figure to figure, some 20 % off in all."""
        overall, draft = np.exp(0.2 * chance.normal(size=2))

        def off(table: dict[int, float], extra: float, factor: float) -> dict[int, float]:
            return {
                size: float((seconds + extra) * factor * np.exp(0.04 * chance.normal()))
                for size, seconds in table.items()
            }

        plain = (self.plain[0] + self.plain[1] * requests) / 1e3
        more = max(0.0, (self.speculative[0] + self.speculative[1] * requests) / 1e3 - plain)
        return CostModel(
            target=off(self.cost.target, plain, overall),
            draft=off(self.cost.draft, more, overall * draft),
            target_context=self.cost.target_context,
            draft_context=self.cost.draft_context,
            target_attention=self.cost.target_attention,
        )


def surfaces() -> list[Surface]:
    """Those of `policy/costs.json`; GPUs with the overheads of SGLang's second speculative engine and of its first."""
    tables = json.loads((DATA / "costs.json").read_text())["surfaces"]
    found = []
    for name, table in tables.items():
        cost = CostModel.model_validate(table)
        if name == "cpu":
            found.append(Surface(name, cost, 8))
        elif name == SERVER:
            found.append(Surface(name, cost, 8, widths=(1, 2, 4, 8)))
        else:
            found.append(Surface(name, cost, 16, plain=(0.75, 0.02), speculative=(0.75, 0.03)))
    return [*found, replace(found[-1], name=f"{found[-1].name}, v1", plain=(0.91, 0.02), speculative=(2.64, 0.112))]


@dataclass(frozen=True)
class Luck:
    """What is fixed of N lanes: [N, L] each, by lane and token."""

    threshold: Floats
    """A slot behind this token is accepted if log(threshold) / log(h) > slot: a uniform draw. Replays: unused."""
    conditional: Floats | None
    """h of the request that the token belongs to."""
    accepted: Integers | None
    """Replays: what a whole block behind the token came to."""
    request: Integers
    left: Integers
    """Tokens of the request from this one on."""
    drift: Callable[[int], float] | None = None
    """h by step, instead of by request."""

    def h(self, place: Integers, step: int) -> Floats:
        """[N] conditional acceptance where the lanes stand."""
        lanes = np.arange(len(place))
        if self.drift is not None:
            return np.full(len(place), self.drift(step))
        assert self.conditional is not None
        return self.conditional[lanes, place]

    def whole_block(self, place: Integers, step: int, block_size: int) -> Integers:
        """[N] drafted tokens of whole blocks that would be accepted."""
        lanes = np.arange(len(place))
        if self.accepted is not None:
            return self.accepted[lanes, place]
        h = np.clip(self.h(place, step), 1e-9, 1 - 1e-9)
        runs = (np.log(self.threshold[lanes, place]) / np.log(h)).astype(np.int64)
        return np.minimum(runs, block_size - 1)


class Load(Protocol):
    """A kind of requests."""

    @property
    def name(self) -> str: ...

    def luck(self, lanes: int, block_size: int, seed: int) -> Luck: ...


def h_of(acceptance_length: float, block_size: int) -> float:
    """The h, alike in all slots, that gives an acceptance length: (1 - h^B) / (1 - h) = τ."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        short = (1 - middle**block_size) / (1 - middle) < acceptance_length
        low, high = (middle, high) if short else (low, middle)
    return low


@dataclass(frozen=True)
class Synthetic:
    """Requests of some 300 tokens, each of one of the acceptance lengths; or all drifting between two of them."""

    name: str
    lengths: tuple[float, ...]
    drifts: bool = False

    def luck(self, lanes: int, block_size: int, seed: int) -> Luck:
        chance, tokens = np.random.default_rng(seed), STEPS * block_size + block_size
        kinds = np.array([h_of(min(length, block_size - 0.5), block_size) for length in self.lengths])
        request, left = np.empty((lanes, tokens), np.int64), np.empty((lanes, tokens), np.int64)
        for lane in range(lanes):
            ends = np.cumsum(20 + chance.exponential(300, size=tokens // 20)).astype(np.int64)
            which = np.searchsorted(ends, np.arange(tokens), side="right")
            request[lane] = lane + lanes * which
            left[lane] = ends[which] - np.arange(tokens)
        by_request = kinds[chance.integers(len(kinds), size=int(request.max()) + 1)]
        drift = partial(_drifting, *kinds) if self.drifts else None
        return Luck(chance.random((lanes, tokens)), by_request[request], None, request, left, drift)


def _drifting(first: float, last: float, step: int) -> float:
    """h of a step, from the first to the last and back within 400."""
    return first + (last - first) * float(0.5 - 0.5 * np.cos(2 * np.pi * step / 400))


@dataclass(frozen=True)
class Replay:
    """Answers of a task as they were recorded (`policy/accepted.json`), in random order."""

    name: str
    answers: tuple[str, ...]

    def luck(self, lanes: int, block_size: int, seed: int) -> Luck:
        chance, tokens = np.random.default_rng(seed), STEPS * block_size + block_size
        accepted, request, left = (np.empty((lanes, tokens), np.int64) for _ in range(3))
        for lane in range(lanes):
            at, count = 0, 0
            while at < tokens:
                answer = self.answers[chance.integers(len(self.answers))][: tokens - at]
                here = slice(at, at + len(answer))
                accepted[lane, here] = [min(int(digit), block_size - 1) for digit in answer]
                request[lane, here], left[lane, here] = lane + lanes * count, np.arange(len(answer), 0, -1)
                at, count = at + len(answer), count + 1
        return Luck(np.empty((0, 0)), None, accepted, request, left)


@dataclass(frozen=True)
class Neighbour:
    """Another process: of every `of` steps those from `first` on take 1.7 times as long."""

    name: str
    first: int
    of: int

    def slows(self, step: int) -> bool:
        """Whether it is there in this step."""
        return step % self.of >= self.first


@dataclass(frozen=True)
class Cell:
    """One situation: what steps cost, what is asked, and what happens meanwhile."""

    surface: Surface
    load: Load
    requests: int
    context: int = 512
    """Tokens of context of each request."""
    neighbour: Neighbour | None = None

    @property
    def context_tokens(self) -> int:
        return self.requests * self.context


def run(
    cell: Cell, policy: WidthPolicy | Oracle, seed: int, marks: Sequence[int] = (100, STEPS), *, own_time: bool = False
) -> list[float]:
    """Tokens per second of the first `marks` steps each; `own_time`: with the CPU time that the policy takes here."""
    luck = cell.load.luck(cell.requests, cell.surface.block_size, seed)
    noise = np.random.default_rng(seed + 10**6)
    lanes, place = np.arange(cell.requests), np.zeros(cell.requests, np.int64)
    known: dict[tuple[int, int], float] = {}
    learns = not isinstance(policy, Oracle | FixedWidth)
    tokens, seconds, rates = 0, 0.0, []
    for step in range(max(marks)):
        ids = luck.request[lanes, place]
        began = thread_time()
        if isinstance(policy, Oracle):
            widths = policy.best(luck.h(place, step))
        elif isinstance(policy, FixedWidth):
            widths = np.full(cell.requests, policy.width)
        else:
            widths = np.array(policy.widths(ids.tolist(), cell.context_tokens))
        own = thread_time() - began
        accepted = np.minimum(luck.whole_block(place, step, cell.surface.block_size), widths - 1)
        gained = np.minimum(accepted + 1, luck.left[lanes, place])
        drafted = cell.requests if cell.surface.widths and widths.max() > 1 else int((widths > 1).sum())
        took = _seconds(cell, known, int(widths.sum()), drafted, step)
        seen = took * float(np.exp(NOISE * noise.normal())) * (3 if noise.random() < 0.005 else 1)
        if learns:
            assert not isinstance(policy, Oracle)
            began = thread_time()
            policy.observe(Step(ids.tolist(), widths.tolist(), accepted.tolist(), seen, cell.context_tokens))
            for ended in ids[luck.request[lanes, place + gained] != ids]:
                policy.forget(int(ended))
            took += thread_time() - began + own if own_time else 0.0
        place, tokens, seconds = place + gained, tokens + int(gained.sum()), seconds + took
        if step + 1 in marks:
            rates.append(tokens / seconds)
    return rates


def _seconds(cell: Cell, known: dict[tuple[int, int], float], rows: int, drafted: int, step: int) -> float:
    if (rows, drafted) not in known:
        of_steps = cell.surface.of_steps(np.array([rows]), np.array([drafted]), cell.requests, cell.context_tokens)
        known[rows, drafted] = float(of_steps[0])
    return known[rows, drafted] * (1.7 if cell.neighbour and cell.neighbour.slows(step) else 1.0)


@dataclass(frozen=True)
class Oracle:
    """The best widths of every step, knowing every request's true survival and every step's true cost."""

    cell: Cell

    def best(self, h: Floats) -> Integers:
        survival = h[:, None] ** np.arange(1, self.cell.surface.block_size)
        choices = choices_of(survival, self.cell.surface.widths)
        seconds = self.cell.surface.of_steps(
            choices.rows, choices.drafted, self.cell.requests, self.cell.context_tokens
        )
        return choices.widths(int(np.argmax(choices.tokens(survival) / seconds)))


def replays() -> list[Replay]:
    """The recorded tasks."""
    tasks = json.loads((DATA / "accepted.json").read_text())["tasks"]
    return [Replay(f"{name} (recorded)", tuple(answers)) for name, answers in tasks.items()]
