"""What each side is asked for a case."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_serve.backend import Prompt
from dflash_serve.proving.lossless.plan import GREEDY, SAMPLED, SEEDED, Case, Plan, Question
from dflash_serve.proving.lossless.record import WITH, WITHOUT

FIRST_SEED = {WITHOUT: 0, WITH: 2**40}
"""Sides draw from seeds of their own: with the same ones an engine that honours them would leave nothing to test."""
SEEDS_A_CASE = 2**20
SEEDED_TOKENS = 32


def questions(plan: Plan, prompts: Sequence[Prompt], case: Case, side: str) -> list[Question]:
    """Greedy and seeded cases ask the plan's prompts, each sampled case one, again and again."""
    chosen = prompts[: plan.prompts]
    if case in GREEDY:
        return [_asked(case, prompt, plan.max_tokens) for prompt in chosen]
    if case is SEEDED:
        tokens = min(SEEDED_TOKENS, plan.max_tokens)
        return [_asked(case, prompt, tokens, seed) for seed, prompt in enumerate(chosen)]
    prompt = prompts[prompt_of(case, len(prompts))]
    first = FIRST_SEED[side] + SAMPLED.index(case) * SEEDS_A_CASE
    # Engines without seeds ignore them.
    return [_asked(case, prompt, plan.sample_tokens, first + n) for n in range(plan.samples)]


def prompt_of(case: Case, count: int) -> int:
    """Index of the prompt that a sampled case asks, of so many."""
    return SAMPLED.index(case) % count


def _asked(case: Case, prompt: Prompt, tokens: int, seed: int | None = None) -> Question:
    return Question(prompt, case.params.model_copy(update={"max_tokens": tokens, "seed": seed}))
