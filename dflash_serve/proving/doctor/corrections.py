"""Does another line in the checkpoint's configuration raise acceptance? The checkpoint's own faults need no server.

Both settings are replayed on the same prompts, so each prompt is its own control: under the null hypothesis the sign of
its difference in τ is a coin, which the sign-flip test takes literally. Bonferroni pays for every setting tried.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from dflash_serve.proving.doctor.counts import Counts, total

FALSE_ALARMS = 0.05
"""Probability that any correction is proposed where none helps."""
MATERIAL = 0.1
"""A correction must win at least this share of the accepted drafted tokens a step."""
EXACT, FLIPS = 12, 4_000
"""All sign patterns up to so many prompts; beyond, so many random ones."""


@dataclass(frozen=True)
class Alternative:
    """Another setting and what it would give."""

    cause: str
    name: str
    setting: str
    predicted: tuple[Counts, ...]


@dataclass(frozen=True)
class Correction:
    """A setting that raises acceptance."""

    alternative: Alternative
    before: float
    """τ as configured."""
    after: float
    interval: tuple[float, float]
    """95 % of the gain in τ (bootstrap over prompts)."""
    p_value: float
    """One-sided, before paying for the number of settings tried."""

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"with {self.alternative.setting} τ rises from {self.before:.2f} to {self.after:.2f} "
            f"(gain {low:.2f} to {high:.2f} at 95 %, p = {self.p_value:.1g})"
        )


def corrections(reference: Sequence[Counts], alternatives: Sequence[Alternative]) -> list[Correction]:
    """Those that raise acceptance significantly and materially, the best first."""
    before, limit = total(reference).length, FALSE_ALARMS / max(1, len(alternatives))
    worth = before + MATERIAL * (before - 1)
    material = [a for a in alternatives if (after := total(a.predicted).length) >= worth and after > before]
    found = [_compare(reference, alternative) for alternative in material]
    return sorted((c for c in found if c.p_value <= limit), key=lambda correction: -correction.after)


def fewest_prompts(settings: int) -> int:
    """Prompts below which not even a gain on every one of them could be significant."""
    return next(count for count in range(1, 64) if 0.5**count <= FALSE_ALARMS / max(1, settings))


def _compare(reference: Sequence[Counts], alternative: Alternative) -> Correction:
    pairs = [(a, b) for a, b in zip(reference, alternative.predicted, strict=True) if a.steps and b.steps]
    differences = [b.length - a.length for a, b in pairs]
    before, after = total(reference).length, total(alternative.predicted).length
    return Correction(alternative, before, after, _interval(pairs), _sign_flip(differences))


def _sign_flip(differences: Sequence[float]) -> float:
    """P(sum of the differences with random signs >= their sum)."""
    generator, observed = random.Random(0), sum(differences)  # noqa: S311 - statistics, not secrets
    if len(differences) <= EXACT:
        patterns = list(product((1, -1), repeat=len(differences)))
    else:
        patterns = [tuple(generator.choices((1, -1), k=len(differences))) for _ in range(FLIPS)]
        patterns.append((1,) * len(differences))
    sums = (sum(sign * d for sign, d in zip(signs, differences, strict=True)) for signs in patterns)
    return sum(one >= observed - 1e-12 for one in sums) / len(patterns)


def _interval(pairs: Sequence[tuple[Counts, Counts]]) -> tuple[float, float]:
    generator, gains = random.Random(0), []  # noqa: S311
    for _ in range(1000):
        chosen = generator.choices(pairs, k=len(pairs))
        gains.append(total(b for _, b in chosen).length - total(a for a, _ in chosen).length)
    gains.sort()
    return gains[25], gains[974]
