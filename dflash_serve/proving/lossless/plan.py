"""What a verification asks, and how it splits its false-alarm rate: fixed before the first answer comes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dflash_serve.backend import Prompt
from dflash_serve.common.frozen import Frozen
from dflash_serve.speculation.params import SamplingParams

LOOKS = (1 / 8, 1 / 4, 1 / 2, 1.0)
"""When the sampled answers are looked at, as shares of all; each look may spend its part of the false-alarm rate."""
NOISE = {"float32": 3e-4, "bfloat16": 0.75}
"""Largest gap of two log-probabilities that rounding may turn round, in nats; where from: see `near_tie`."""


@dataclass(frozen=True)
class Case:
    """One way of choosing tokens."""

    name: str
    params: SamplingParams

    @property
    def penalised(self) -> bool:
        return self.params.penalised


@dataclass(frozen=True)
class Question:
    """One request."""

    prompt: Prompt
    params: SamplingParams


GREEDY = (
    Case("greedy", SamplingParams(temperature=0)),
    # No repetition penalty: it scales logits, and log-probabilities do not tell what it made of a near-tie.
    Case("greedy, penalties", SamplingParams(temperature=0, presence_penalty=0.5, frequency_penalty=0.5)),
)
SAMPLED = (
    Case("temperature 0.7", SamplingParams(temperature=0.7)),
    Case("temperature 1", SamplingParams(temperature=1)),
    Case("temperature 1.3, top-p 0.9", SamplingParams(temperature=1.3, top_p=0.9)),
    Case(
        "temperature 0.8, penalties",
        SamplingParams(temperature=0.8, presence_penalty=0.8, frequency_penalty=0.8, repetition_penalty=1.2),
    ),
)
SEEDED = Case("same seeds", SamplingParams(temperature=0.8, top_p=0.95))


class Plan(Frozen):
    """The settings of a verification."""

    prompts: int
    """Prompts compared greedily."""
    prompts_sha256: str
    max_tokens: int
    """Of a greedy answer."""
    samples: int
    """Answers on either side for each sampled case; 0 = sampling is not verified."""
    sample_tokens: int = 8
    """Of a sampled answer."""
    false_alarm: float = 1e-3
    """Probability that an engine which samples rightly is called faulty, over all cases and looks together."""
    power: float = 0.9
    """At which the smallest visible deviation is given."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the engine's arithmetic: what a near-tie is depends on it."""
    penalties: bool = True
    """Whether cases with penalties are verified, too."""
    same_seeds: bool = False
    """The engine promises the same sampled tokens for the same seed, with any width: compare those, too."""

    @property
    def noise(self) -> float:
        return NOISE[self.dtype]

    @property
    def greedy_cases(self) -> tuple[Case, ...]:
        return tuple(case for case in GREEDY if self.penalties or not case.penalised)

    @property
    def sampled_cases(self) -> tuple[Case, ...]:
        return tuple(case for case in SAMPLED if self.samples and (self.penalties or not case.penalised))

    @property
    def looks(self) -> Iterator[tuple[int, float]]:
        """Samples a side, and the false-alarm rate that one case may spend there: linear in the samples.

        The union bound over looks and cases keeps the sum; nothing is assumed about how they depend on each other.
        """
        spent = 0.0
        for share in LOOKS:
            yield max(1, round(share * self.samples)), self.false_alarm / len(SAMPLED) * (share - spent)
            spent = share


def prompts_digest(prompts: list[Prompt]) -> str:
    """sha256 over all prompts, in order."""
    return hashlib.sha256(repr([p if isinstance(p, str) else list(p) for p in prompts]).encode()).hexdigest()
