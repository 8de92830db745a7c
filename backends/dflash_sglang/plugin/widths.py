"""Which width a batch is verified with: the policy's widths of its requests, made one for all. Needs no SGLang."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from dflash_serve.deployment import ENV_PREFIX
from dflash_serve.errors import UserError
from dflash_serve.speculation.allocation import CostModel
from dflash_serve.speculation.width import AutoWidth, FixedWidth, WidthPolicy
from dflash_sglang.launch_plan import WIDTH_VARIABLE

from .results import StepResult

COST_TABLE = f"{ENV_PREFIX}COST_TABLE"
"""A JSON file of measured costs, to use instead of measuring at start-up."""
MOST_REQUESTS = 65536
"""Beyond so many the oldest requests are forgotten: SGLang does not tell of the end of aborted ones."""
AUTO = 0
"""What `asked_width` calls an automatic width."""


def asked_width(environment: Mapping[str, str] = os.environ) -> int | None:
    """The width that was asked for, AUTO where it follows the policy; None = none was: SGLang's own whole blocks.

    Raises:
        UserError: neither a number nor `auto`.
    """
    text = environment.get(WIDTH_VARIABLE)
    if text is None:
        return None
    if text == "auto":
        return AUTO
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    what = f"{text!r} is neither a number of slots nor auto"
    raise UserError(what, where=WIDTH_VARIABLE, do="correct it; without speculation, leave --speculative-algorithm out")


def given_cost(environment: Mapping[str, str] = os.environ) -> CostModel | None:
    """The cost table that was given; None = measure.

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


def make_policy(block_size: int, cost: CostModel | None, offered: Collection[int]) -> WidthPolicy:
    """The one width that is offered, or among several the one that pays by `cost`.

    Args:
        offered: widths that can be verified, B among them unless it is a fixed one.
    """
    if cost is None:
        return FixedWidth(min(offered))
    return AutoWidth(cost, block_size, allowed_widths=sorted(set(offered) - {1}))


class BatchWidths:
    """One width for a whole batch, from a policy that speaks of requests."""

    def __init__(self, policy: WidthPolicy, offered: Collection[int]) -> None:
        self.policy, self.offered = policy, sorted(offered)
        self._known: dict[str, None] = {}

    @property
    def keeps_features(self) -> bool:
        """Whether the drafter is to get the context features of what is verified."""
        return True

    def choose(self, request_ids: Sequence[str], context_tokens: int = 0) -> int:
        """The width of the coming step: the smallest offered one that is enough for every request.

        Args:
            context_tokens: K/V tokens of all requests together.
        """
        self._known.update(dict.fromkeys(request_ids))
        while len(self._known) > MOST_REQUESTS:
            self.finished(next(iter(self._known)))
        wanted = max(self.policy.widths(request_ids), default=1)
        return next((width for width in self.offered if width >= wanted), self.offered[-1])

    def verified(self, step: StepResult) -> None:
        """Learns from a step."""
        for request_id, count in step.accepted:
            if request_id in self._known:
                self.policy.observe(request_id, step.width, count)

    def finished(self, request_id: str) -> None:
        """Forgets a request."""
        self._known.pop(request_id, None)
        self.policy.forget(request_id)
