"""Do two sets of sampled answers come from one distribution? An exact permutation test, looked at several times.

What is compared: how each answer begins (its first 1, 2, ... tokens) and which token stands at each place. Each of
these that at least `SMALLEST` answers share is counted on both sides, the rest of its kind together, and

    S = sum over counts of (a - b)^2 / (a + b),

Pearson's two-sample statistic summed over all these tables. The tables depend on one another, so S has no textbook
distribution; but if both sides draw from one distribution, then given all answers every way of dealing them to the two
sides is equally likely. p is the share of dealings whose S is as large: exact for any counts, however small.

Dealings are drawn at random (the observed one counts as one of them, which keeps p exact). Drawing stops once so many
were as large that p can no longer come below the rate it is compared with (Besag and Clifford, 1991).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from dflash_serve.proving.lossless.near_tie import Pieces

SMALLEST = 8
"""Answers that must share something for it to be a count of its own."""
ENOUGH = 20
"""Dealings as large as what was observed after which no more are drawn."""
Floats = NDArray[np.float32]


def begins_and_places(answer: Pieces) -> Iterator[tuple[tuple[str, int], Hashable]]:
    """(kind, value): the answer's first 1, 2, ... tokens, and the token at each place after the first."""
    for length in range(1, len(answer) + 1):
        yield ("begins", length), tuple(answer[:length])
        if length > 1:
            yield ("place", length), answer[length - 1]


@dataclass(frozen=True)
class Table:
    """features[i, j]: whether answer i has what count j counts; one column of each kind takes what is rare."""

    features: Floats
    columns: dict[tuple[tuple[str, int], Hashable], int]

    @classmethod
    def of(cls, answers: Sequence[Pieces]) -> Table:
        """Of all answers of both sides together."""
        counts = Counter(entry for answer in answers for entry in begins_and_places(answer))
        kept = [entry for entry, count in counts.items() if count >= SMALLEST]
        rare = sorted({(kind, None) for kind, _ in counts})
        columns: dict[tuple[tuple[str, int], Hashable], int] = {
            entry: n for n, entry in enumerate([*kept, *((kind, _Rare) for kind, _ in rare)])
        }
        table = cls(np.zeros((0, len(columns)), np.float32), columns)
        return cls(table.rows(answers), columns)

    def rows(self, answers: Sequence[Pieces]) -> Floats:
        """features of any answers: [answers, columns]."""
        rows = np.zeros((len(answers), len(self.columns)), np.float32)
        for row, answer in zip(rows, answers, strict=True):
            for kind, value in begins_and_places(answer):
                column = self.columns.get((kind, value), self.columns.get((kind, _Rare)))
                if column is not None:
                    row[column] = 1
        return rows


class _Rare:
    """The value that stands for all rare ones."""


def statistic(differences: Floats, totals: Floats) -> Floats:
    """S. differences: [..., columns] a - b; totals: broadcastable, a + b."""
    result: Floats = (differences**2 / np.maximum(totals, 1)).sum(-1)
    return result


def p_value(first: Sequence[Pieces], second: Sequence[Pieces], rate: float, seed: int = 0) -> float:
    """Of equal distribution; exact where it is at most `rate`, and coarser the further it is above."""
    if not first or not second:
        return 1.0
    features = Table.of([*first, *second]).features
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
        alike += _pairs(Counter(begin[:-1] for begin in whole))
        same += _pairs(Counter(whole))
    return same / alike if alike else None


def _pairs(counts: Counter[tuple[str | int, ...]]) -> int:
    return sum(count * (count - 1) // 2 for count in counts.values())
