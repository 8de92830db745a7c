"""A width for every batch size, worked out before launch: what vLLM can follow without any code of ours in it.

The same costs and the same choice as the embedded engine's (`speculation.allocation`), with a survival that was
measured (`doctor`, `verify` and `bench` tell it by slot). It follows the load, and neither requests nor the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from dflash_serve.deployment import ENV_PREFIX
from dflash_serve.errors import UserError
from dflash_serve.speculation.allocation import choose_widths
from dflash_serve.speculation.costs import CostModel

SURVIVAL = f"{ENV_PREFIX}SURVIVAL"
"""Survival of slots 1, 2, ... as numbers with commas; with a cost table, what a static schedule follows from."""
Row = list[int]
"""vLLM's: first batch size, last one, drafted tokens (slots without the anchor)."""


def given_survival(environment: Mapping[str, str] = os.environ) -> tuple[float, ...] | None:
    """The survival that was given; None = none.

    Raises:
        UserError: it is none.
    """
    text = environment.get(SURVIVAL)
    if text is None:
        return None
    try:
        found = tuple(float(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(1 >= early >= late >= 0 for early, late in zip((1.0, *found), found, strict=False)):
        do = "give each slot's share of accepted drafts, never rising, such as 0.63,0.35,0.2"
        raise UserError(f"{text!r} is no survival", where=SURVIVAL, do=do)
    return found


def static_schedule(
    cost: CostModel, survival: Sequence[float], widths: Sequence[int], max_batch_size: int
) -> list[Row]:
    """For every batch size the one of `widths` with the most tokens per second, as vLLM's rows; 0 drafted = off."""
    rows: list[Row] = []
    for batch, width in enumerate(_widths(cost, survival, widths, max_batch_size), start=1):
        if rows and rows[-1][2] == width - 1:
            rows[-1][1] = batch
        else:
            rows.append([batch, batch, width - 1])
    return rows


def _widths(cost: CostModel, survival: Sequence[float], widths: Sequence[int], most: int) -> Iterator[int]:
    slots = [*survival, *[0.0] * max(widths)][: max(widths) - 1]
    for batch in range(1, most + 1):
        yield choose_widths([slots] * batch, cost, allowed_widths=widths)[0]


def every_width(widths: Sequence[int], max_batch_size: int) -> list[Row]:
    """A schedule in which every width occurs, because vLLM captures CUDA graphs of those that do, and of no others.

    The widest are for the smallest batches; our scheduler looks widths up elsewhere.
    """
    rows = [[batch, batch, width - 1] for batch, width in enumerate(sorted(widths, reverse=True), start=1)]
    rows[-1][1] = max_batch_size
    return rows
