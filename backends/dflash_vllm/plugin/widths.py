"""Which width the coming step drafts for, and what the policy learns of the last one. Needs no vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from dflash_serve.deployment import ENV_PREFIX
from dflash_serve.errors import UserError
from dflash_serve.speculation.allocation import CostModel
from dflash_serve.speculation.width import AutoWidth, WidthPolicy

COST_TABLE = f"{ENV_PREFIX}COST_TABLE"
"""A JSON file of measured costs, to begin with."""


def given_cost(environment: Mapping[str, str] = os.environ) -> CostModel | None:
    """The cost table that was given; None = none.

    Raises:
        UserError: the file cannot be read or is no cost table.
    """
    path = environment.get(COST_TABLE)
    if path is None:
        return None
    try:
        return CostModel.model_validate_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise UserError(f"no cost table ({str(error).splitlines()[0]})", where=path) from None


def make_policy(block_size: int, allowed_widths: Sequence[int]) -> WidthPolicy:
    """The policy of a server whose steps may have these widths.

    Raises:
        UserError: the cost table that was given is none.
    """
    cost = given_cost() or CostModel(target={1: 1.0, 64: 1.0, 640: 10.0}, draft={1: 0.15, 64: 0.15, 640: 1.5})
    return AutoWidth(cost, block_size, allowed_widths=[width for width in allowed_widths if width > 1])


class LiveWidths:
    """One width for a whole batch, from a policy that speaks of requests."""

    def __init__(self, policy: WidthPolicy) -> None:
        self.policy = policy

    def choose(self, request_ids: Sequence[str], context_tokens: int) -> int:
        """The width of the blocks that this step drafts, verified by the next one."""
        return max(self.policy.widths(request_ids), default=1)

    def verified(self, steps: Mapping[str, tuple[int, int]], *, seconds: float | None, context_tokens: int) -> None:
        """Learns from a step.

        Args:
            steps: request ids -> (width, drafted tokens that were accepted).
            seconds: what it took; None where it was no clean measurement.
            context_tokens: tokens of all its requests' contexts together.
        """
        for request_id, (width, accepted) in steps.items():
            self.policy.observe(request_id, width, accepted)

    def finished(self, request_ids: Sequence[str]) -> None:
        """Forgets requests."""
        for request_id in request_ids:
            self.policy.forget(request_id)
