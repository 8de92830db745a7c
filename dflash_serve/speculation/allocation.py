"""Which widths give the most tokens per second: those that maximise

    sum_i (1 + sum_{k=1}^{w_i - 1} S_ik) / (T_draft(n) + T_target(sum_i w_i)),    T_draft = 0 if all w_i = 1.

The optimum is exact. (1) Fix the total number R of drafted rows; the denominator is then fixed. A choice of widths
adds R of the numbers S_ik to the numerator, so no more than the sum of the R largest. (2) That sum is attained: S_ik
does not increase with k, so the R largest, ties taken in order of k, hold slot k of a request only together with its
slots before k; that is a choice of widths. (3) Trying every R, 0 included, with these widths therefore meets the best
choice of all. One sort and one look at the cost model per row.
"""

from collections.abc import Sequence
from itertools import accumulate

from dflash_serve.speculation.cost import CostModel


def choose_widths(
    survivals: Sequence[Sequence[float]],
    cost: CostModel,
    *,
    max_width: int,
    allowed_widths: Sequence[int] | None = None,
) -> list[int]:
    """Chooses each request's width in 1..max_width so that expected tokens per second are highest.

    Args:
        survivals: per request, P(slot k is accepted) for k = 1, 2, ...; one that is shorter than max_width - 1 caps
            that request's width at its length + 1. A rise (rounding) is read as level.
        cost: measured seconds.
        max_width: the block size B, or less.
        allowed_widths: the widths that the engine can run (CUDA graphs); all requests then share one of them, cut to
            a request's own cap only for counting tokens. Width 1 is always allowed.

    Returns:
        One width per request; all 1 means: do not draft. Among equals, the fewest rows.
    """
    capped = [list(accumulate(survival[: max_width - 1], min)) for survival in survivals]
    if allowed_widths is not None:
        return _shared_width(capped, cost, [width for width in allowed_widths if 1 < width <= max_width])
    # Python's sort is stable and slots come in order, which is the tie rule that the proof asks for.
    gains = sorted(((gain, i) for i, survival in enumerate(capped) for gain in survival), key=lambda g: -g[0])
    n = len(capped)
    best_rate, best_rows, tokens = _rate_when_off(n, cost), 0, float(n)
    draft_seconds = cost.draft_seconds(n) if n else 0.0
    for rows, (gain, _) in enumerate(gains, start=1):
        tokens += gain
        rate = tokens / (draft_seconds + cost.target_seconds(n + rows))
        if rate > best_rate:
            best_rate, best_rows = rate, rows
    widths = [1] * n
    for _, i in gains[:best_rows]:
        widths[i] += 1
    return widths


def _shared_width(survivals: Sequence[Sequence[float]], cost: CostModel, allowed: Sequence[int]) -> list[int]:
    n = len(survivals)
    best_rate, best_width = _rate_when_off(n, cost), 1
    for width in sorted(allowed):
        tokens = n + sum(sum(survival[: width - 1]) for survival in survivals)
        rate = tokens / cost.step_seconds([width] * n) if n else 0.0
        if rate > best_rate:
            best_rate, best_width = rate, width
    return [best_width] * n


def _rate_when_off(n: int, cost: CostModel) -> float:
    return n / cost.target_seconds(n) if n else 0.0
