"""An exact permutation test of two sides' sampled answers, which must come from one distribution.

An answer's features are its first 1, 2, ... tokens and the token at each place. A feature that at least `SMALLEST`
answers share is counted by itself on both sides, the others of its kind together, and

    S = sum over counts of (a - b)^2 / (a + b),

Pearson's two-sample statistic summed over all these tables. The tables depend on one another, so S has no textbook
distribution; but if both sides draw from one distribution, then given all answers every assignment of them to the two
sides is equally likely. p is the share of assignments whose S is as large: exact for any counts, however small.

Assignments are drawn at random (the observed one counts as one of them, which keeps p exact). Drawing stops when so
many were as large that p can no longer fall below the rate it is compared with (Besag and Clifford, 1991).

The power of the test is given as the smallest deviation that it would have seen (`smallest_deviation`). That deviation
is of the kind that faults of speculation cause: the second token (the first drafted one) is its most probable value too
often, or too seldom if that value has most of the mass. Its size is the total variation between the two distributions
of that token: the share of answers in which the token is wrong.
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

SMALLEST = 8  # Answers that must share a feature for it to be counted by itself
ENOUGH = 20  # Assignments with an S as large as the observed one after which drawing stops
TRIALS = 200  # Simulated runs that estimate the power at one deviation
HALVINGS = 9  # Bisections in the search for the smallest visible deviation
NEW = "\0another token"
Floats = NDArray[np.float32]


class DistributionComparison(Frozen):
    """Both sides' answers to one sampled case, compared as draws from a distribution."""

    case: str
    prompt: int | None = None  # From 1 on, in the order of the prompt set; None = several
    where: str | None = None  # The group of several prompts' answers that differs most (`ranks`)
    samples: int  # On each side
    p_value: float | None = None
    differs: bool = False
    smallest_deviation: float | None = None
    """Least total variation of a next-token distribution that would have been seen with the stated power."""
    repeats_with: float | None = None
    """Probability that two answers which begin alike go on alike; 1 = as if greedy. See `repeats`."""
    repeats_without: float | None = None
    refused: str | None = None  # The server's reason for giving no answers


def begins_and_places(answer: Pieces) -> Iterator[tuple[tuple[str, int], Hashable]]:
    """(kind, value): the answer's first 1, 2, ... tokens, and the token at each place after the first."""
    for length in range(1, len(answer) + 1):
        yield ("begins", length), tuple(answer[:length])
        if length > 1:
            yield ("place", length), answer[length - 1]


def features(answers: Sequence[Pieces], of: Sequence[Pieces]) -> Floats:
    """Counted features of the answers `of`, [of, columns]: 1 if an answer has the column's feature.

    Args:
        answers: both sides' answers together. A feature that enough of them share has a column of its own; for each
            kind all rarer ones share one.
    """
    counts = Counter(entry for answer in answers for entry in begins_and_places(answer))
    kept = [entry for entry, count in counts.items() if count >= SMALLEST]
    kinds = sorted({kind for kind, _ in counts})
    columns = {entry: n for n, entry in enumerate([*kept, *((kind, None) for kind in kinds)])}
    table = np.zeros((len(of), len(columns)), np.float32)
    for row, answer in zip(table, of, strict=True):
        for kind, value in begins_and_places(answer):
            column = columns.get((kind, value), columns.get((kind, None)))
            if column is not None:
                row[column] = 1
    return table


def statistic(differences: Floats, totals: Floats) -> Floats:
    """S, [...]. differences: a - b, [..., columns]; totals: a + b, broadcastable to them."""
    result: Floats = (differences**2 / np.maximum(totals, 1)).sum(-1)
    return result


def p_value(first: Sequence[Pieces], second: Sequence[Pieces], rate: float, seed: int = 0) -> float:
    """The probability of a difference as large if both sides draw from one distribution.

    Exact up to `rate`, and coarser above it.
    """
    if not first or not second:
        return 1.0
    both = [*first, *second]
    table = features(both, both)
    totals = table.sum(0)
    side = np.ones(len(table), np.float32)
    side[len(first) :] = -1
    observed = statistic(side @ table, totals) * (1 - 1e-6)  # float32 must not tell equal sums apart
    random = np.random.default_rng(seed)
    drawn, as_large, most, batch = 0, 0, ceil(2 / rate), 32
    while drawn < most and as_large < ENOUGH:
        batch = min(2 * batch, 1024, most - drawn)
        dealt = random.permuted(np.broadcast_to(side, (batch, len(side))).copy(), axis=1)
        as_large += int((statistic(dealt @ table, totals) >= observed).sum())
        drawn += batch
    return (1 + as_large) / (1 + drawn)


def repeats(answers: Sequence[Pieces]) -> float | None:
    """The share of pairs of answers that go on alike among those that begin alike; 1 = as if decoding were greedy.

    The first token is left out, because the prompt's own pass draws it, and the last, because engines do not draft a
    token that they cannot use. None without such pairs.
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
    """Total variation at which `samples` answers on each side give p <= rate with probability `power`.

    Estimated by simulation from all answers, with an error of about 10 %. None if even the largest deviation of this
    kind would not be seen, or answers have no second token.
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
    table, random = features(list(known.elements()), distinct), np.random.default_rng(seed)

    def simulated(share: float, runs: int) -> Floats:
        """S of each run, `share` of the second side's answers being drawn from `other`."""
        a, b = (random.multinomial(samples, q, runs) @ table for q in (p, (1 - share) * p + share * other))
        return statistic(a - b, a + b)

    def seen(share: float) -> bool:
        return float((simulated(share, TRIALS) > limit).mean()) >= power

    sound = simulated(0.0, 2 * TRIALS)
    mean, spread = float(sound.mean()), float(sound.std())
    limit = mean  # the upper quantile of S as a shifted gamma (Pearson III) with these moments
    if spread > 0:
        limit = float(pearson3.isf(rate, max(float(skew(sound)), 0.1), loc=mean, scale=spread))
    if not seen(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if seen(middle) else (middle, high)
    return high * (1 - common if common < 0.5 else common)
