"""Does another line in the checkpoint's configuration raise acceptance? The checkpoint's own faults need no server.

Bonferroni's correction pays for every setting that was tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_serve.doctor.statistics import gain_interval, gain_p_value
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

FALSE_ALARMS = 0.05
"""Probability that any correction is proposed where none helps."""
MATERIAL = 0.1
"""A correction must win at least this share of the accepted drafted tokens a step."""


@dataclass(frozen=True)
class Alternative:
    """Another setting and what it would give."""

    cause: str
    name: str
    setting: str
    predicted: tuple[AcceptanceStatistics, ...]
    """By prompt."""


@dataclass(frozen=True)
class Correction:
    """A setting that raises acceptance."""

    alternative: Alternative
    before: float
    """τ as configured."""
    after: float
    """τ with this setting."""
    interval: tuple[float, float]
    """95 % interval of the gain in τ."""
    p_value: float
    """One-sided, before paying for the number of settings tried."""

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"with {self.alternative.setting} τ rises from {self.before:.2f} to {self.after:.2f} "
            f"(gain {low:.2f} to {high:.2f} at 95 %, p = {self.p_value:.1g})"
        )


def corrections(reference: Sequence[AcceptanceStatistics], alternatives: Sequence[Alternative]) -> list[Correction]:
    """Those that raise acceptance significantly and materially, the best first.

    Args:
        reference: as configured, by prompt; the same prompts as the alternatives'.
    """
    limit = FALSE_ALARMS / max(1, len(alternatives))
    compared = [correction for each in alternatives if (correction := _compare(reference, each)) is not None]
    return sorted((c for c in compared if c.p_value <= limit), key=lambda correction: -correction.after)


def fewest_prompts(settings: int) -> int:
    """Prompts below which not even a gain on every one of them could be significant."""
    return next(count for count in range(1, 64) if 0.5**count <= FALSE_ALARMS / max(1, settings))


def _compare(reference: Sequence[AcceptanceStatistics], alternative: Alternative) -> Correction | None:
    """None where the gain is immaterial, or fewer than two prompts can be compared."""
    before, after = total(reference).acceptance_length, total(alternative.predicted).acceptance_length
    pairs = zip(reference, alternative.predicted, strict=True)
    drafted = [(a, b) for a, b in pairs if a.verifications and b.verifications]
    if before is None or after is None or len(drafted) < 2:
        return None
    if after <= before or after < before + MATERIAL * (before - 1):
        return None
    old, new = [a for a, _ in drafted], [b for _, b in drafted]
    return Correction(alternative, before, after, gain_interval(old, new), gain_p_value(old, new))
