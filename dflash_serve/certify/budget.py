"""Time that the steps of a certification take on a machine whose speed was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dflash_serve.answers.engine import Prompt
from dflash_serve.bench.settings import BenchSettings
from dflash_serve.verify.amount import Amount, amount_of
from dflash_serve.verify.questions import FEWEST, VerifyPlan

AIPERF_SECONDS = 10.0  # From aiperf's start to its first request, and from the last one to its end
IN_FLIGHT = 16  # Requests in flight while answers are verified
FEWEST_PROMPTS = 8  # Fewest prompts of a verification, even if they take longer than its share
SAMPLES = (1024, 512, 256, 128, FEWEST)
LONG_SHARE, LONGEST = 0.2, 2048  # Largest share of a verification's time for its long answers, and their most tokens
LONG_ANSWERS = 4  # Two prompts on two sides


class Speed(NamedTuple):
    """Tokens/s of a server."""

    alone: float  # Of one answer at a time
    together: float  # Of answers at the largest load
    prompts: float  # Of a long prompt

    def at(self, users: int) -> float:
        """Tokens/s of so many answers at once."""
        return min(users * self.alone, self.together)

    def seconds(self, amount: Amount) -> float:
        """Time of a verification."""
        return amount.generated / self.at(IN_FLIGHT) + amount.prompts / self.prompts


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
        return plan if speed.seconds(amount_of(plan, prompts, context)) <= seconds else None

    every = len(prompts)
    sizes = [*((every, samples) for samples in SAMPLES), *((n, 0) for n in range(every, FEWEST_PROMPTS, -1))]
    return next((plan for size in sizes if (plan := fits(*size))), least)


def run_seconds(settings: BenchSettings, users: int, speed: Speed) -> float:
    """Time of one run of aiperf."""
    return AIPERF_SECONDS + settings.requests(users) * settings.max_tokens / speed.at(users)
