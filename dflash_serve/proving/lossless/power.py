"""The smallest deviation that a test could have seen, from the answers themselves.

The deviation looked for is the one that faults of speculation make: the second token (the first that is drafted) comes
out as its most probable value too often, or, where that one has most of the mass, too seldom; what follows it follows
as before. Its size is the total variation between the two distributions of that token: the share of answers in which it
is another one than it should be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from dflash_serve.proving.lossless.near_tie import Pieces
from dflash_serve.proving.lossless.two_sample import Floats, Table, statistic

TRIALS = 200
STEPS = 9
"""Halvings of the interval that is searched."""
NEW = "\0another token"


def smallest_deviation(
    answers: Sequence[Pieces], samples: int, rate: float, power: float, seed: int = 0
) -> float | None:
    """Total variation, at which `samples` answers on either side give p <= rate with probability `power`.

    By simulation from all answers seen, so it is an estimate (to some 10 % of itself). None if even the largest
    deviation of this kind would go unseen, or answers have no second token.
    """
    random = np.random.default_rng(seed)
    known = Counter(tuple(answer) for answer in answers if len(answer) > 1)
    if not known:
        return None
    mode, count = Counter(answer[1] for answer in known.elements()).most_common(1)[0]
    common, total = count / known.total(), known.total()
    distinct = [*known, (next(iter(known))[0], NEW)]  # one more that never came, in case there was only one
    p = np.array([*(number / total for number in known.values()), 0.0])
    wanted = np.array([(answer[1] == mode) == (common < 0.5) for answer in distinct], float)
    other = wanted * np.maximum(p, 1e-9)
    features = Table.of(list(known.elements())).rows(distinct)
    draw = _Trials(features, p, other / other.sum(), samples, random)
    limit = _upper_quantile(draw.statistics(0.0, 2 * TRIALS), rate, random)
    if not draw.seen(1.0, limit, power):
        return None
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if draw.seen(middle, limit, power) else (middle, high)
    return high * (1 - common if common < 0.5 else common)


class _Trials:
    """Two sides of simulated answers; the second deviates."""

    def __init__(
        self, features: Floats, p: np.ndarray, other: np.ndarray, samples: int, random: np.random.Generator
    ) -> None:
        self.features, self.p, self.other, self.samples, self.random = features, p, other, samples, random

    def statistics(self, share: float, trials: int) -> Floats:
        """S of each trial, `share` of the second side's answers being drawn from `other`."""
        first = self.random.multinomial(self.samples, self.p, trials) @ self.features
        second = (
            self.random.multinomial(self.samples, (1 - share) * self.p + share * self.other, trials) @ self.features
        )
        return statistic(first - second, first + second)

    def seen(self, share: float, limit: float, power: float) -> bool:
        return float((self.statistics(share, TRIALS) > limit).mean()) >= power


def _upper_quantile(values: Floats, rate: float, random: np.random.Generator) -> float:
    """Of S without a deviation: a shifted gamma distribution with the same mean, spread and skewness."""
    mean, spread = float(values.mean()), float(values.std())
    if spread == 0:
        return mean
    skewness = max(float((((values - mean) / spread) ** 3).mean()), 0.1)
    shape = 4 / skewness**2
    gamma = random.gamma(shape, size=int(40 / rate))
    return mean + spread * (float(np.quantile(gamma, 1 - rate)) - shape) / float(np.sqrt(shape))
