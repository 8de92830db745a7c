"""Corrections of a checkpoint: lines of its configuration that would raise acceptance if changed.

Two settings are compared on the same prompts, so each prompt is its own control: under the null hypothesis its
difference in τ is as likely positive as negative (the sign-flip test). Bonferroni's correction accounts for the number
of settings that were tried. No server is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from dflash_serve.common.settings import Frozen
from dflash_serve.doctor.evidence import known_counts
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

FALSE_ALARMS = 0.05
"""Probability that a correction is proposed although none helps."""
MATERIAL = 0.1
"""Least relative gain of a correction in accepted drafted tokens per step."""

FLIPS = 4096
"""Sign patterns of the sign-flip test: all of them up to 12 prompts; beyond, so many random ones."""
RESAMPLES = 1000
"""Bootstrap samples of the prompts for an interval."""

Counts = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Alternative:
    """Another setting and its predicted acceptance."""

    cause: str
    setting: str
    predicted: tuple[AcceptanceStatistics, ...]
    """Predicted counts, by prompt."""


class Correction(Frozen):
    """A setting that raises acceptance."""

    cause: str
    setting: str
    before: float
    """τ as configured."""
    after: float
    """τ with this setting."""
    gain_95: tuple[float, float]
    """95 % interval of the gain in τ."""
    p_value: float
    """One-sided, before Bonferroni's correction."""

    def __str__(self) -> str:
        low, high = self.gain_95
        return (
            f"with {self.setting} τ rises from {self.before:.2f} to {self.after:.2f} "
            f"(gain {low:.2f} to {high:.2f} at 95 %, p = {self.p_value:.1g})"
        )


def corrections(reference: Sequence[AcceptanceStatistics], alternatives: Sequence[Alternative]) -> list[Correction]:
    """Settings that raise acceptance significantly and materially over `reference` (as configured), the best first."""
    limit = FALSE_ALARMS / max(1, len(alternatives))
    compared = [correction for each in alternatives if (correction := _compare(reference, each)) is not None]
    return sorted((c for c in compared if c.p_value <= limit), key=lambda correction: -correction.after)


def fewest_prompts(settings: int) -> int:
    """Least number of prompts at which a gain on every one of them is significant."""
    return next(count for count in range(1, 64) if 0.5**count <= FALSE_ALARMS / max(1, settings))


def _compare(reference: Sequence[AcceptanceStatistics], alternative: Alternative) -> Correction | None:
    before, after = total(reference).acceptance_length, total(alternative.predicted).acceptance_length
    pairs = zip(reference, alternative.predicted, strict=True)
    drafted = [(a, b) for a, b in pairs if a.verifications and b.verifications]
    if before is None or after is None or len(drafted) < 2:
        return None
    if after <= before or after < before + MATERIAL * (before - 1):
        return None
    old, new = [a for a, _ in drafted], [b for _, b in drafted]
    return Correction(
        cause=alternative.cause,
        setting=alternative.setting,
        before=before,
        after=after,
        gain_95=gain_interval(old, new),
        p_value=gain_p_value(old, new),
    )


def gain_p_value(before: Sequence[AcceptanceStatistics], after: Sequence[AcceptanceStatistics]) -> float:
    """P(a gain in τ as large as this) if both settings are equally good: one-sided, by sign flips.

    Args:
        before, after: counts of the same prompts, two at least, all with verifications.
    """
    differences = [_length(b) - _length(a) for a, b in zip(before, after, strict=True)]
    test = stats.permutation_test(
        (differences,),
        np.sum,
        permutation_type="samples",
        vectorized=True,
        n_resamples=FLIPS,
        alternative="greater",
        rng=np.random.default_rng(0),
    )
    return float(test.pvalue)


def gain_interval(before: Sequence[AcceptanceStatistics], after: Sequence[AcceptanceStatistics]) -> tuple[float, float]:
    """95 % interval of the gain in τ, by the bootstrap over prompts; `before` and `after` as in `gain_p_value`."""

    def gain(steps: Counts, accepted: Counts, new_steps: Counts, new_accepted: Counts, axis: int) -> Counts:
        gained: Counts = new_accepted.sum(axis) / new_steps.sum(axis) - accepted.sum(axis) / steps.sum(axis)
        return gained

    counts = [column for side in (before, after) for column in zip(*map(known_counts, side), strict=True)]
    interval = stats.bootstrap(
        counts,
        gain,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def _length(counts: AcceptanceStatistics) -> float:
    verifications, accepted = known_counts(counts)
    return 1 + accepted / verifications
