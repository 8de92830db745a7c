"""Time that the steps of a certification take on a machine whose speed was measured.

The cost of a verification is counted on its own questions, made from answers of the longest length. A prompt that a
case repeats counts once a side, because servers keep its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dflash_serve.answers.engine import Prompt
from dflash_serve.bench.settings import BenchSettings
from dflash_serve.verify.questions import (
    AS_ASKED,
    CONTINUABLE,
    FEWEST,
    WITH,
    WITHOUT,
    Known,
    Question,
    Told,
    VerifyPlan,
    questions,
)

AIPERF_SECONDS = 10.0  # From aiperf's start to its first request, and from the last one to its end
IN_FLIGHT = 16  # Requests in flight while answers are verified
FEWEST_PROMPTS = 8  # Fewest prompts of a verification, even if they take longer than its share
SAMPLES = (1024, 512, 256, 128, FEWEST)
LONG_SHARE, LONGEST = 0.2, 2048  # Largest share of a verification's time for its long answers, and their most tokens
LONG_ANSWERS = 4  # Two prompts on two sides
CHARACTERS = 4  # Characters of a prompt's token


class Speed(NamedTuple):
    """Tokens/s of a server."""

    alone: float  # Of one answer at a time
    together: float  # Of answers at the largest load
    prompts: float  # Of a long prompt

    def at(self, users: int) -> float:
        """Tokens/s of so many answers at once."""
        return min(users * self.alone, self.together)

    def seconds(self, work: Work) -> float:
        """Time of a verification."""
        return work.generated / self.at(IN_FLIGHT) + work.prompts / self.prompts


class Work(NamedTuple):
    """Answers and tokens of a verification, on both sides."""

    answers: int
    generated: int
    prompts: int


def work_of(plan: VerifyPlan, prompts: Sequence[Prompt], context: int) -> Work:
    """The work of a verification: at most so much, where answers end before their longest length.

    Args:
        context: most tokens of a prompt and its answer.
    """
    longest = plan.max_tokens
    known = [
        Known("word " * longest, range(n * longest, (n + 1) * longest), range(_tokens(prompt)))
        for n, prompt in enumerate(prompts[: plan.prompts])
    ]
    told, answers, generated, read = Told(known, {}, context, AS_ASKED), 0, 0, 0
    for case in plan.cases:
        for side in (WITHOUT, WITH):
            asked = questions(plan, prompts, case, side, told)
            made = sum(_longest(one) for one in asked)
            again = side == WITHOUT and case in CONTINUABLE and plan.dtype != "float32"  # continued behind near-ties
            answers, generated = answers + len(asked), generated + made * (2 if again else 1)
            read += sum(_tokens(prompt) for prompt in {repr(one.prompt): one.prompt for one in asked}.values())
    return Work(answers, generated, read)


def _longest(asked: Question) -> int:
    choices: int = asked.more.get("n", 1)
    return (asked.params.max_tokens or 0) * choices


def _tokens(prompt: Prompt) -> int:
    if isinstance(prompt, str):
        return -(-len(prompt) // CHARACTERS)
    return sum(1 if isinstance(one, int) else -(-len(str(one.get("content"))) // CHARACTERS) for one in prompt)


def largest_plan(
    least: VerifyPlan, prompts: Sequence[Prompt], context: int, speed: Speed, seconds: float
) -> VerifyPlan:
    """The largest verification that takes so long; the least one decides greedy decoding alone.

    Args:
        least: the settings that do not depend on time.
    """
    long = min(LONGEST, int(LONG_SHARE * seconds * speed.alone / 2))  # both long answers of a side run at once
    with_long = least.model_copy(update={"long_tokens": long if long > least.max_tokens else 0})

    def fits(count: int, samples: int) -> VerifyPlan | None:
        plan = with_long.model_copy(update={"prompts": count, "samples": samples})
        return plan if speed.seconds(work_of(plan, prompts, context)) <= seconds else None

    every = len(prompts)
    sizes = [*((every, samples) for samples in SAMPLES), *((n, 0) for n in range(every, FEWEST_PROMPTS, -1))]
    return next((plan for size in sizes if (plan := fits(*size))), least)


def run_seconds(settings: BenchSettings, users: int, speed: Speed) -> float:
    """Time of one run of aiperf."""
    return AIPERF_SECONDS + settings.requests(users) * settings.max_tokens / speed.at(users)
