"""A permutation test of sampled answers that have nothing in common but their questions.

Both sides answer each question once, with seeds of their own. A question may have any prompt, settings and fields: if
both sides draw from one distribution, then exchanging its two answers changes no probability. Each answer has these
features, a mean over its tokens each:

| feature | mean of |
|---|---|
| early, late | the ranks of the first choice's tokens up to the eighth, and after it |
| second | the ranks of the second choice's tokens |
| repeated | 1 for a token that is in the prompt or earlier in its choice, else 0 |
| scored | 1 if every token has its log-probabilities, else 0 |

A rank is the number of reported best tokens that are more probable than the drawn one (`rules.Answer.ranks`).
Temperature and filters do not change ranks, so it does not matter if an engine reports log-probabilities with them or
without. Penalties do change them: no log-probabilities are asked for with penalties.

The questions are counted in groups: every case, situation and setting (`questions.CELLS`) by itself, all together, and
the streamed ones of each setting and of all. With d the difference of a feature in a question's answers, a group has

    z = |sum of d| / sqrt(sum of d^2),

and the statistic is the largest z of any group and feature. p is the share of random exchanges whose largest z is as
large: exact, whatever the dependence of the groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import ceil
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from dflash_serve.verify.distributions import ENOUGH, DistributionComparison
from dflash_serve.verify.questions import CELLS
from dflash_serve.verify.rules import Answer, Asked
from dflash_serve.verify.tokens import Piece

NAME = "mixed situations"
EARLY = 8  # Tokens after which a draw counts as late
BATCH = 1024  # Exchanges that are drawn at once
Floats = NDArray[np.float32]


def compare_mixed(asked: Sequence[Asked], rate: float) -> DistributionComparison:
    """All answers to the cases of `questions.MIXED`; `where` names the group that differs most."""
    groups, table = _table(asked)
    p, worst = exchange_p_value(table, rate)
    return DistributionComparison(
        case=NAME, samples=len(asked), p_value=p, differs=p <= rate, where=groups[worst] if groups else None
    )


def features(answer: Answer, prompt: Sequence[Piece]) -> Iterator[tuple[str, float]]:
    """The features of an answer; one without tokens of a kind has fewer."""
    each = max(1, len(answer.pieces) // answer.choices)
    choices = [answer.pieces[begin : begin + each] for begin in range(0, len(answer.pieces), each)]
    scored = answer.ranks is not None and len(answer.ranks) == len(answer.pieces)
    yield "scored", float(scored)
    if answer.ranks is not None and scored:
        first, second = answer.ranks[:each], answer.ranks[each:]
        for name, ranks in (("early", first[:EARLY]), ("late", first[EARLY:]), ("second", second)):
            if ranks:
                yield name, fmean(ranks)
    seen = [piece in prompt or piece in choice[:at] for choice in choices for at, piece in enumerate(choice)]
    if seen:
        yield "repeated", fmean(seen)


def exchange_p_value(table: Floats, rate: float, seed: int = 0) -> tuple[float, int]:
    """The probability of a largest z as large if both sides draw from one distribution, and the column of that z.

    Exact up to `rate`, and coarser above it.

    Args:
        table: differences of the features of both answers, [questions, columns]; 0 where a column does not count one.
    """
    norms = np.sqrt((table**2).sum(0))  # exchanging answers does not change them
    if not norms.any():
        return 1.0, 0
    scaled = table / np.where(norms > 0, norms, 1)
    found = np.abs(scaled.sum(0))
    observed, random = found.max() * (1 - 1e-5), np.random.default_rng(seed)  # float32 must not tell equal sums apart
    drawn, as_large, most = 0, 0, ceil(2 / rate)
    while drawn < most and as_large < ENOUGH:
        signs = 2 * random.integers(0, 2, (min(BATCH, most - drawn), len(scaled)), np.int8).astype(np.float32) - 1
        as_large += int((np.abs(signs @ scaled).max(1) >= observed).sum())
        drawn += len(signs)
    return (1 + as_large) / (1 + drawn), int(found.argmax())


def _table(asked: Sequence[Asked]) -> tuple[list[str], Floats]:
    # the names of the columns' groups, and the table of `exchange_p_value`
    columns = defaultdict[tuple[str, str], dict[int, float]](dict)
    for row, one in enumerate(asked):
        situation, setting = CELLS[one.case]
        prompt = one.plain.prompt_ids or one.question.prompt
        known = [piece for piece in prompt if isinstance(piece, int)]
        plain, other = (dict(features(answer, known)) for answer in (one.plain, one.other))
        groups = [one.case, situation, setting, "all"]
        if "stream" in one.question.more:
            groups += [f"{setting}, streamed", "all, streamed"]
        for name in plain.keys() & other.keys():
            for group in groups:
                columns[group, name][row] = other[name] - plain[name]
    table = np.zeros((len(asked), len(columns)), np.float32)
    for number, values in enumerate(columns.values()):
        table[list(values), number] = list(values.values())
    return [group for group, _ in columns], table
