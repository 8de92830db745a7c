"""The questions of a verification and the shares of its false-alarm rate, fixed before the first answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pydantic import Field, JsonValue

from dflash_serve.backend import Prompt
from dflash_serve.common.settings import Frozen
from dflash_serve.speculation.params import SamplingParams

Precision = Literal["float32", "bfloat16"]
WITH, WITHOUT = "with", "without"  # The two sides of a verification: with and without speculation
FEWEST = 64  # Least samples on a side: fewer show only very large deviations
NOISE: dict[Precision, float] = {"float32": 3e-4, "bfloat16": 0.75}
"""Largest gap of two log-probabilities whose order rounding may change, in nats; measured, see `tokens`."""
FIRST_SEED = {WITHOUT: 0, WITH: 2**40}
"""The sides draw from different seeds: with equal ones an engine that keeps seeds would give equal answers."""
SEEDS_A_CASE = 2**20
SEEDED_TOKENS = 32  # Length of answers with the same seed on both sides


class Case(NamedTuple):
    """A named setting of sampling."""

    name: str
    params: SamplingParams


class Question(NamedTuple):
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
PENALISED = {case.name for case in (*GREEDY, *SAMPLED) if case.params.penalised}


class VerifyPlan(Frozen):
    """The settings of a verification."""

    prompts: int  # Prompts compared greedily
    prompts_sha256: str
    chat_template_kwargs: dict[str, JsonValue] = Field(
        default={}
    )  # Variables that every prompt gives the target's chat template
    max_tokens: int  # Longest greedy answer, in tokens
    samples: int  # Answers on each side for each sampled case; 0 = sampling is not verified
    sample_tokens: int = 8  # Longest sampled answer, in tokens
    false_alarm: float = 1e-3  # Probability that a correct engine is called faulty, over all sampled cases together
    power: float = 0.9  # Probability with which the smallest visible deviation is seen
    dtype: Precision = "bfloat16"  # The engine's precision, which sets the bound of a near-tie
    penalties: bool = True  # True if cases with penalties are verified, too
    same_seeds: bool = False
    """True if the engine promises the same sampled tokens for the same seed at any width; they are compared, too."""

    @property
    def noise(self) -> float:
        return NOISE[self.dtype]

    @property
    def greedy_cases(self) -> tuple[Case, ...]:
        return self._wanted(GREEDY)

    @property
    def sampled_cases(self) -> tuple[Case, ...]:
        return self._wanted(SAMPLED) if self.samples else ()

    @property
    def token_cases(self) -> tuple[Case, ...]:
        """The cases whose answers must be equal token for token."""
        return (*self.greedy_cases, SEEDED) if self.same_seeds else self.greedy_cases

    @property
    def scope(self) -> tuple[str, ...]:
        """Restrictions of the verdict; empty = everything was asked."""
        return (*(() if self.samples else ("greedy only",)), *(() if self.penalties else ("no penalties",)))

    @property
    def rate(self) -> float:
        """The false-alarm rate of one sampled case: by the union bound, whatever their dependence on each other."""
        return self.false_alarm / len(SAMPLED)

    def _wanted(self, cases: tuple[Case, ...]) -> tuple[Case, ...]:
        return tuple(case for case in cases if self.penalties or not case.params.penalised)


def questions(plan: VerifyPlan, prompts: Sequence[Prompt], case: Case, side: str) -> list[Question]:
    """The questions to a side: greedy and seeded cases take the plan's prompts, each sampled case repeats one."""

    def question(prompt: Prompt, tokens: int, seed: int | None = None) -> Question:
        return Question(prompt, case.params.model_copy(update={"max_tokens": tokens, "seed": seed}))

    chosen = prompts[: plan.prompts]
    if case in GREEDY:
        return [question(prompt, plan.max_tokens) for prompt in chosen]
    if case is SEEDED:
        return [question(prompt, min(SEEDED_TOKENS, plan.max_tokens), seed) for seed, prompt in enumerate(chosen)]
    prompt = prompts[prompt_index(case, len(prompts))]
    first = FIRST_SEED[side] + SAMPLED.index(case) * SEEDS_A_CASE
    return [question(prompt, plan.sample_tokens, first + n) for n in range(plan.samples)]  # some engines ignore seeds


def prompt_index(case: Case, count: int) -> int:
    """The index among `count` prompts of the one that a sampled case asks."""
    return SAMPLED.index(case) % count
