"""The width that the next step drafts for, and what the policy learns from the last step. Needs no vLLM."""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Mapping, Sequence
from statistics import median
from typing import Protocol

from pydantic import ValidationError

from dflash_serve.deployment import given_cost
from dflash_serve.errors import UserError
from dflash_serve.speculation.costs import CostModel, LearntCosts
from dflash_serve.speculation.policy import FixedWidth, Step, WidthPolicy
from dflash_vllm.schedule import GUESSED_COSTS

CLEAN, ANY = 4, 32
"""Steps after which the unit of guessed costs is known: steps of decoding alone, or steps of any kind."""


class MakePolicy(Protocol):
    """Makes a policy from costs: given ones, or guessed ones and their corrections."""

    def __call__(
        self, cost: CostModel, *, believed: bool = False, learnt: LearntCosts | None = None
    ) -> WidthPolicy: ...


def make_widths(
    make_policy: MakePolicy, learnt: LearntCosts | None = None, environment: Mapping[str, str] = os.environ
) -> LiveWidths:
    """The widths of a server, from the costs that it was given or from a guess.

    Args:
        make_policy: makes the policy.
        learnt: corrections of the guess from the last run; None: its unit is unknown.
        environment: has the costs or the guess.

    Raises:
        UserError: the costs cannot be read.
    """
    cost = given_cost(environment)
    if cost is not None:
        return LiveWidths(make_policy(cost, believed=True))
    try:
        guess = CostModel.model_validate_json(environment.get(GUESSED_COSTS, ""))
    except ValidationError as error:
        where, do = GUESSED_COSTS, "start it by `dflash-serve serve`, or give a cost table"
        raise UserError(f"no costs ({str(error).splitlines()[0]})", where=where, do=do) from None
    return LiveWidths(make_policy(guess, learnt=learnt) if learnt else _Unscaled(guess, make_policy))


class LiveWidths:
    """One width for a whole batch, from a policy that gives each request a width of its own."""

    def __init__(self, policy: WidthPolicy) -> None:
        self.policy = policy

    def choose(self, request_ids: Sequence[str], context_tokens: int) -> int:
        """The width of the blocks that this step drafts; the next step verifies them."""
        return max(self.policy.widths(request_ids, context_tokens), default=1)

    def verified(self, steps: Mapping[str, tuple[int, int]], *, seconds: float | None, context_tokens: int) -> None:
        """Learns from a step.

        Args:
            steps: request ids -> (width, drafted tokens that were accepted).
            seconds: its time; None if it did other work, too.
            context_tokens: sum of all its requests' contexts.
        """
        widths, accepted = [width for width, _ in steps.values()], [count for _, count in steps.values()]
        self.policy.observe(Step(list(steps), widths, accepted, seconds, context_tokens))

    def finished(self, request_ids: Sequence[str]) -> None:
        """Forgets requests."""
        for request_id in request_ids:
            self.policy.forget(request_id)


class _Unscaled:
    """Does not draft until a few steps have told the unit of guessed costs; then hands over to the real policy."""

    def __init__(self, guess: CostModel, make_policy: MakePolicy) -> None:
        self.guess, self.make_policy = guess, make_policy
        self.policy: WidthPolicy = FixedWidth(1)
        self._ratios: list[float] | None = []  # measured over guessed seconds of each clean step; None: handed over
        self._steps = 0

    @property
    def paused(self) -> bool:
        return False

    def widths(
        self, request_ids: Sequence[Hashable], context_tokens: int = 0, undraftable: Collection[Hashable] = ()
    ) -> list[int]:
        return self.policy.widths(request_ids, context_tokens, undraftable)

    def observe(self, step: Step) -> None:
        if self._ratios is None:
            self.policy.observe(step)
        elif step.widths:
            self._measure(step, self._ratios)

    def forget(self, request_id: Hashable) -> None:
        self.policy.forget(request_id)

    def _measure(self, step: Step, ratios: list[float]) -> None:
        self._steps += 1
        if step.seconds:
            ratios.append(step.seconds / self.guess.step_seconds(list(step.widths), step.context_tokens))
        if len(ratios) >= CLEAN or self._steps >= ANY:
            unit = LearntCosts.of_unit(median(ratios) if ratios else 1.0)
            self.policy = self.make_policy(self.guess, learnt=unit)
            self._ratios = None
