"""Answers and tokens of a verification, counted on its own questions, made from answers of the longest length.

A prompt that a case repeats counts once a side, because servers keep its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dflash_serve.answers.engine import Prompt
from dflash_serve.verify.questions import (
    AS_ASKED,
    CONTINUABLE,
    WITH,
    WITHOUT,
    Known,
    PlainFacts,
    Question,
    VerifyPlan,
    questions,
)

CHARACTERS = 4  # Characters of a prompt's token


class Amount(NamedTuple):
    """Answers and tokens of a verification, on both sides."""

    answers: int
    generated: int
    prompts: int


def amount_of(plan: VerifyPlan, prompts: Sequence[Prompt], context: int) -> Amount:
    """The answers and tokens of a verification: at most so many, where answers end before their longest length.

    Args:
        context: most tokens of a prompt and its answer.
    """
    longest = plan.max_tokens
    known = [
        Known("word " * longest, range(n * longest, (n + 1) * longest), range(_tokens(prompt)))
        for n, prompt in enumerate(prompts[: plan.prompts])
    ]
    facts, answers, generated, read = PlainFacts(known, {}, context, AS_ASKED), 0, 0, 0
    for case in plan.cases:
        for side in (WITHOUT, WITH):
            asked = questions(plan, prompts, case, side, facts)
            made = sum(_longest(one) for one in asked)
            again = side == WITHOUT and case in CONTINUABLE and plan.dtype != "float32"  # continued behind near-ties
            answers, generated = answers + len(asked), generated + made * (2 if again else 1)
            read += sum(_tokens(prompt) for prompt in {repr(one.prompt): one.prompt for one in asked}.values())
    return Amount(answers, generated, read)


def _longest(asked: Question) -> int:
    choices: int = asked.more.get("n", 1)
    return (asked.params.max_tokens or 0) * choices


def _tokens(prompt: Prompt) -> int:
    if isinstance(prompt, str):
        return -(-len(prompt) // CHARACTERS)
    return sum(1 if isinstance(one, int) else -(-len(str(one.get("content"))) // CHARACTERS) for one in prompt)
