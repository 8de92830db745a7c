"""Sampled answers that must come from one distribution: an exact permutation test, looked at several times.

What is compared: how each answer begins (its first 1, 2, ... tokens) and which token stands at each place. Each of
these that at least `SMALLEST` answers share is counted on both sides, the rest of its kind together, and

    S = sum over counts of (a - b)^2 / (a + b),

Pearson's two-sample statistic summed over all these tables. The tables depend on one another, so S has no textbook
distribution; but if both sides draw from one distribution, then given all answers every way of dealing them to the two
sides is equally likely. p is the share of dealings whose S is as large: exact for any counts, however small.

Dealings are drawn at random (the observed one counts as one of them, which keeps p exact). Drawing stops once so many
were as large that p can no longer come below the rate it is compared with (Besag and Clifford, 1991).

What such a test could have seen is told beside it (`smallest_deviation`). The deviation looked for is the one that
faults of speculation make: the second token (the first that is drafted) comes out as its most probable value too often,
or, where that one has most of the mass, too seldom; what follows it follows as before. Its size is the total variation
between the two distributions of that token: the share of answers in which it is another one than it should be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from math import ceil, comb

import numpy as np
from numpy.typing import NDArray
from scipy.stats import pearson3, skew

from dflash_serve.common.settings import Frozen
from dflash_serve.verify.tokens import Pieces

SMALLEST = 8
"""Answers that must share something for it to be a count of its own."""
ENOUGH = 20
"""Dealings as large as what was observed after which no more are drawn."""
TRIALS = 200
"""Simulated runs by which the power at one deviation is told."""
HALVINGS = 9
"""Of the interval in which the smallest visible deviation is searched."""
NEW = "\0another token"
Floats = NDArray[np.float32]


class Look(Frozen):
    """A permutation test over the samples so far."""

    samples: int
    """On either side."""
    p_value: float
    false_alarm: float
    """The rate that this look may spend; at or below it the distributions differ."""


class DistributionComparison(Frozen):
    """Both sides' answers to one sampled case, compared as draws from a distribution."""

    case: str
    prompt: int
    """From 1 on, in the order of the prompt set."""
    samples: int
    looks: tuple[Look, ...] = ()
    differs: bool = False
    smallest_deviation: float | None = None
    """Total variation of a next-token distribution that would have been seen with the stated power."""
    repeats_with: float | None = None
    """How far the beginning of an answer fixes its next token; 1 = as if greedy."""
    repeats_without: float | None = None
    refused: str | None = None
    """Why there are no answers, by the server that did not give them."""


def begins_and_places(answer: Pieces) -> Iterator[tuple[tuple[str, int], Hashable]]:
    """(kind, value): the answer's first 1, 2, ... tokens, and the token at each place after the first."""
    for length in range(1, len(answer) + 1):
        yield ("begins", length), tuple(answer[:length])
        if length > 1:
            yield ("place", length), answer[length - 1]


class CountTable:
    """What is counted: whatever enough answers share, and for each kind all that is rarer together (value None).

    Args:
        answers: those of both sides together.
    """

    def __init__(self, answers: Sequence[Pieces]) -> None:
        counts = Counter(entry for answer in answers for entry in begins_and_places(answer))
        kept = [entry for entry, count in counts.items() if count >= SMALLEST]
        kinds = sorted({kind for kind, _ in counts})
        self.columns = {entry: n for n, entry in enumerate([*kept, *((kind, None) for kind in kinds)])}

    def rows(self, answers: Sequence[Pieces]) -> Floats:
        """Features of any answers, [answers, columns]: 1 where an answer has what the column counts."""
        rows = np.zeros((len(answers), len(self.columns)), np.float32)
        for row, answer in zip(rows, answers, strict=True):
            for kind, value in begins_and_places(answer):
                column = self.columns.get((kind, value), self.columns.get((kind, None)))
                if column is not None:
                    row[column] = 1
        return rows


def statistic(differences: Floats, totals: Floats) -> Floats:
    """S, [...]. differences: a - b, [..., columns]; totals: a + b, broadcastable to them."""
    result: Floats = (differences**2 / np.maximum(totals, 1)).sum(-1)
    return result


def p_value(first: Sequence[Pieces], second: Sequence[Pieces], rate: float, seed: int = 0) -> float:
    """The probability of a difference as large if both sides draw from one distribution.

    Exact where it is at most `rate`, and coarser the further it is above.
    """
    if not first or not second:
        return 1.0
    both = [*first, *second]
    features = CountTable(both).rows(both)
    totals = features.sum(0)
    side = np.ones(len(features), np.float32)
    side[len(first) :] = -1
    observed = statistic(side @ features, totals) * (1 - 1e-6)  # float32 must not tell equal sums apart
    random = np.random.default_rng(seed)
    drawn, as_large, most, batch = 0, 0, ceil(2 / rate), 32
    while drawn < most and as_large < ENOUGH:
        batch = min(2 * batch, 1024, most - drawn)
        dealt = random.permuted(np.broadcast_to(side, (batch, len(side))).copy(), axis=1)
        as_large += int((statistic(dealt @ features, totals) >= observed).sum())
        drawn += batch
    return (1 + as_large) / (1 + drawn)


def repeats(answers: Sequence[Pieces]) -> float | None:
    """How far the beginning of an answer fixes its next token: 1 = wholly, as if it were greedy.

    Over all pairs of answers that begin alike, the share that goes on alike. The first token is left out, because the
    prompt's own pass draws it, and the last, because no engine drafts what it cannot use. None without such pairs.
    """
    alike = same = 0
    longest = max(map(len, answers), default=0)
    for length in range(1, longest - 1):
        whole = [tuple(answer[: length + 1]) for answer in answers if len(answer) > length]
        alike += sum(comb(count, 2) for count in Counter(begin[:-1] for begin in whole).values())
        same += sum(comb(count, 2) for count in Counter(whole).values())
    return same / alike if alike else None


def smallest_deviation(
    answers: Sequence[Pieces], samples: int, rate: float, power: float, seed: int = 0
) -> float | None:
    """Total variation, at which `samples` answers on either side give p <= rate with probability `power`.

    By simulation from all answers seen, so it is an estimate (to some 10 % of itself). None if even the largest
    deviation of this kind would go unseen, or answers have no second token.
    """
    known = Counter(tuple(answer) for answer in answers if len(answer) > 1)
    if not known:
        return None
    mode, count = Counter(answer[1] for answer in known.elements()).most_common(1)[0]
    common = count / known.total()
    distinct = [*known, (next(iter(known))[0], NEW)]  # one more that never came, in case there was only one
    p = np.array([*(number / known.total() for number in known.values()), 0.0])
    wanted = np.array([(answer[1] == mode) == (common < 0.5) for answer in distinct], float)
    other = wanted * np.maximum(p, 1e-9) / (wanted * np.maximum(p, 1e-9)).sum()
    features, random = CountTable(list(known.elements())).rows(distinct), np.random.default_rng(seed)

    def simulated(share: float, runs: int) -> Floats:
        """S of each run, `share` of the second side's answers being drawn from `other`."""
        a, b = (random.multinomial(samples, q, runs) @ features for q in (p, (1 - share) * p + share * other))
        return statistic(a - b, a + b)

    def seen(share: float) -> bool:
        return float((simulated(share, TRIALS) > limit).mean()) >= power

    limit = _upper_quantile(simulated(0.0, 2 * TRIALS), rate)
    if not seen(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if seen(middle) else (middle, high)
    return high * (1 - common if common < 0.5 else common)


def _upper_quantile(values: Floats, rate: float) -> float:
    """What S exceeds with probability `rate`, if it is a shifted gamma (Pearson III) with these values' moments."""
    mean, spread = float(values.mean()), float(values.std())
    if spread == 0:
        return mean
    return float(pearson3.isf(rate, max(float(skew(values)), 0.1), loc=mean, scale=spread))
