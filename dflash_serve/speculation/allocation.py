"""Which widths give the most tokens per second: those that maximise

    sum_i (1 + sum_{k=1}^{w_i - 1} S_ik) / (T_draft + T_target(sum_i w_i)),    T_draft = 0 if all w_i = 1.

Where every request has a width of its own the optimum is found among N (B-1) + 1 choices. (1) Fix the total number R
of drafted rows; the denominator is then fixed. A choice of widths adds R of the numbers S_ik to the numerator, so no
more than the sum of the R largest. (2) That sum is attained: S_ik does not increase with k, so the R largest, ties
taken in order of k, hold slot k of a request only together with its slots before k; that is a choice of widths. (3)
Trying every R, 0 included, with these widths therefore meets the best choice of all. (Exact where T_draft does not
depend on how many requests are drafted; where it does, the requests left out are those that promise least.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dflash_serve.speculation.costs import Context, CostModel, Floats, Integers

TIE: Final = 1e-12


@dataclass(frozen=True)
class Choices:
    """M choices of widths for a batch of N requests, each wider than the one before it; the first is off (all 1)."""

    requests: int
    rows: Integers
    """[M] slots that each verifies."""
    drafted: Integers
    """[M] requests that each drafts for."""
    order: Integers | None
    """[M-1] places in the flattened survival matrix, in the order in which slots are added; None = shared widths."""

    @classmethod
    def ragged(cls, survival: Floats) -> Choices:
        """Each request its own width; slots are added from the likeliest to the least likely."""
        requests, slots = survival.shape
        # The tie rule that the proof asks for: of slots that are alike, the first ones of the block first.
        order = np.argsort((TIE * np.arange(slots) - survival).ravel())
        drafted = np.concatenate([[0], np.cumsum(order % slots == 0)])
        return cls(requests, requests + np.arange(len(order) + 1), drafted, order)

    @classmethod
    def shared(cls, requests: int, widths: Sequence[int]) -> Choices:
        """One width for all, of those allowed."""
        each = np.array([1, *sorted({width for width in widths if width > 1})])
        return cls(requests, requests * each, np.where(each > 1, requests, 0), None)

    def tokens(self, survival: Floats) -> Floats:
        """[..., M] tokens expected of each choice, by these survivals [..., N, B-1]."""
        estimates = survival.shape[:-2]
        slots = survival.sum(-2) if self.order is None else survival.reshape(*estimates, -1)[..., self.order]
        tokens = np.full((*estimates, slots.shape[-1] + 1), float(self.requests))
        tokens[..., 1:] += slots.cumsum(-1)
        return tokens if self.order is not None else tokens[..., self.rows // self.requests - 1]

    def widths(self, choice: int) -> Integers:
        """[N]: the width of each request in one of the choices."""
        if self.order is None:
            return np.full(self.requests, self.rows[choice] // self.requests)
        slots = len(self.order) // self.requests
        return 1 + np.bincount(self.order[:choice] // slots, minlength=self.requests)


def choose_widths(
    survivals: Sequence[Sequence[float]],
    cost: CostModel,
    *,
    allowed_widths: Sequence[int] | None = None,
    context_tokens: int = 0,
) -> list[int]:
    """Chooses each request's width in 1..B so that expected tokens per second are highest.

    Args:
        survivals: [N, B-1], per request P(slot k is accepted) for k = 1, 2, ...; a rise (rounding) is read as level.
        cost: seconds.
        allowed_widths: the widths that the engine can run (CUDA graphs); all requests then share one of them. Width 1
            is always allowed.
        context_tokens: K/V tokens of all requests together.

    Returns:
        One width per request; all 1 means: do not draft. Among equals, the fewest rows.
    """
    if not survivals:
        return []
    survival = np.minimum.accumulate(np.array(survivals, dtype=float), axis=1)
    choices = choices_of(survival, allowed_widths)
    context = Context(context_tokens, len(survival))
    rate = choices.tokens(survival) / cost.of_steps(choices.rows, choices.drafted, context)
    return [int(width) for width in choices.widths(int(np.argmax(rate)))]


def choices_of(survival: Floats, allowed_widths: Sequence[int] | None) -> Choices:
    """Those of an engine: any width for any request, or one of the allowed ones for all."""
    if allowed_widths is None:
        return Choices.ragged(survival)
    return Choices.shared(len(survival), [width for width in allowed_widths if width <= survival.shape[1] + 1])


def widths_by_batch(
    survival: Sequence[float], cost: CostModel, allowed_widths: Sequence[int], max_batch_size: int
) -> list[tuple[int, int, int]]:
    """For every batch size the one of the allowed widths with the most tokens per second; among equals the narrowest.

    Args:
        survival: of slots 1, 2, ...; a slot beyond it is never accepted.

    Returns:
        (first batch size, last one, width) of each stretch, from 1 to `max_batch_size` without a gap.
    """
    widths = np.array(sorted(allowed_widths))
    slots = np.array([*survival, *[0.0] * int(widths[-1])])[: widths[-1] - 1]
    tokens = 1 + np.concatenate([[0.0], np.cumsum(np.minimum.accumulate(slots))])[widths - 1]
    stretches: list[tuple[int, int, int]] = []
    for batch in range(1, max_batch_size + 1):
        seconds = cost.of_steps(batch * widths, np.where(widths > 1, batch, 0))
        width = int(widths[np.argmax(tokens / seconds)])
        first = stretches.pop()[0] if stretches and stretches[-1][2] == width else batch
        stretches.append((first, batch, width))
    return stretches
