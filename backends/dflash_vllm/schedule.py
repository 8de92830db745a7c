"""vLLM's tables of widths: a static one, worked out before launch, and one that only names every width.

The static one is what vLLM can follow without any code of ours in it: it follows the load, and neither requests nor
the machine (`dflash_serve.deployment`, `speculation.allocation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_serve.common.settings import ENV_PREFIX

if TYPE_CHECKING:
    from dflash_serve.speculation.costs import CostModel

GUESSED_COSTS = f"{ENV_PREFIX}GUESSED_COSTS"
"""Environment variable: costs as JSON, in steps of one request, by the models' sizes. Served steps correct them."""
Row = list[int]  # vLLM's: first batch size, last one, drafted tokens (slots without the anchor)


def static_schedule(
    cost: CostModel, survival: Sequence[float], widths: Sequence[int], max_batch_size: int
) -> list[Row]:
    """The width with the most tokens per second for every batch size; 0 drafted = off."""
    from dflash_serve.speculation.allocation import widths_by_batch  # numpy, which not every install has

    stretches = widths_by_batch(survival, cost, widths, max_batch_size)
    return [[first, last, width - 1] for first, last, width in stretches]


def every_width(widths: Sequence[int], max_batch_size: int) -> list[Row]:
    """A schedule in which every width occurs, because vLLM captures CUDA graphs of those that do, and of no others.

    The widest are for the smallest batches; our scheduler looks widths up elsewhere.
    """
    rows = [[batch, batch, width - 1] for batch, width in enumerate(sorted(widths, reverse=True), start=1)]
    rows[-1][1] = max_batch_size
    return rows
