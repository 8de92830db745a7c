"""Which width a batch is verified with: the policy's widths of its requests, made one for all. Needs no SGLang."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from dflash_serve.deployment import ENV_PREFIX
from dflash_serve.errors import UserError
from dflash_serve.speculation.costs import CostModel
from dflash_serve.speculation.width import AutoWidth, FixedWidth, Step, WidthPolicy
from dflash_sglang.launch_plan import WIDTH_VARIABLE

COST_TABLE = f"{ENV_PREFIX}COST_TABLE"
"""A JSON file of measured costs, to use instead of measuring at start-up."""
MOST_REQUESTS = 65536
"""Beyond so many the oldest requests are forgotten: SGLang does not tell of the end of aborted ones."""


def allowed_widths(block_size: int) -> list[int]:
    """Powers of two, and B: few, so that each can have its CUDA graphs. Width 1 is always allowed, and not listed."""
    return [width for width in (2, 4, 8, 16, 32) if width < block_size] + [block_size]


def asked_width(environment: Mapping[str, str] = os.environ) -> int | None:
    """The fixed width that was asked for; None = automatic.

    Raises:
        UserError: neither a number nor `auto`.
    """
    text = environment.get(WIDTH_VARIABLE, "auto")
    if text == "auto":
        return None
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise UserError(f"{text!r} is neither a number of slots nor auto", where=WIDTH_VARIABLE)


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


def make_policy(block_size: int, cost: CostModel | None) -> WidthPolicy:
    """The fixed width that was asked for, or the one that pays by `cost`."""
    fixed = asked_width()
    if fixed is not None or cost is None:
        return FixedWidth(min(fixed or block_size, block_size))
    return AutoWidth(cost, block_size, allowed_widths=allowed_widths(block_size))


class BatchWidths:
    """One width for a whole batch, from a policy that speaks of requests."""

    def __init__(self, policy: WidthPolicy) -> None:
        self.policy = policy
        self._known: dict[str, None] = {}

    def choose(self, request_ids: Sequence[str]) -> int:
        """The width of the coming step."""
        self._known.update(dict.fromkeys(request_ids))
        while len(self._known) > MOST_REQUESTS:
            self.finished(next(iter(self._known)))
        return max(self.policy.widths(request_ids), default=1)

    def verified(self, width: int, accepted: Sequence[tuple[str, int]]) -> None:
        """Learns from a step; called by `metrics.on_result`."""
        known = [(request_id, count) for request_id, count in accepted if request_id in self._known]
        ids, counts = [request_id for request_id, _ in known], [count for _, count in known]
        self.policy.observe(Step(ids, [width] * len(known), counts))

    def finished(self, request_id: str) -> None:
        """Forgets a request."""
        self._known.pop(request_id, None)
        self.policy.forget(request_id)
