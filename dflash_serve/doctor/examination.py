"""The run of an examination from the first probe to the report, and corrections of a checkpoint that explain faults.

Corrections compare two settings on the same prompts, so each prompt is its own control: under the null hypothesis its
difference in τ is as likely positive as negative (the sign-flip test). Bonferroni's correction accounts for the number
of settings that were tried. No server is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dflash_serve.common.progress import doing
from dflash_serve.common.settings import Frozen
from dflash_serve.common.store import Store
from dflash_serve.doctor.diagnosis import (
    HEALTHY,
    AcceptanceFigures,
    ExaminationReport,
    Hypothesis,
    SuspectReport,
    Verdict,
    diagnose,
)
from dflash_serve.doctor.evidence import Fault, Observation, Reference, known_counts
from dflash_serve.errors import UserError
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

FALSE_ALARMS = 0.05  # Probability that a correction is proposed although none helps
MATERIAL = 0.1  # Least relative gain of a correction in accepted drafted tokens per step
FLIPS = 4096  # Sign patterns of the sign-flip test: all of them up to 12 prompts; beyond, so many random ones
RESAMPLES = 1000  # Bootstrap samples of the prompts for an interval

Counts = NDArray[np.float64]


class Correction(Frozen):
    """A setting that raises acceptance."""

    cause: str
    setting: str
    before: float  # τ as configured
    after: float  # τ with this setting
    gain_95: tuple[float, float]  # 95 % interval of the gain in τ
    p_value: float  # One-sided, before Bonferroni's correction

    def __str__(self) -> str:
        low, high = self.gain_95
        return (
            f"with {self.setting} τ rises from {self.before:.2f} to {self.after:.2f} "
            f"(gain {low:.2f} to {high:.2f} at 95 %, p = {self.p_value:.1g})"
        )


def corrections(reference: Sequence[AcceptanceStatistics], alternatives: Sequence[Hypothesis]) -> list[Correction]:
    """Settings that raise acceptance significantly and materially over `reference` (as configured), the best first."""
    limit = FALSE_ALARMS / max(1, len(alternatives))
    compared = [correction for each in alternatives if (correction := _compare(reference, each)) is not None]
    return sorted((c for c in compared if c.p_value <= limit), key=lambda correction: -correction.after)


def fewest_prompts(settings: int) -> int:
    """Least number of prompts at which a gain on every one of them is significant."""
    return next(count for count in range(1, 64) if 0.5**count <= FALSE_ALARMS / max(1, settings))


def _compare(reference: Sequence[AcceptanceStatistics], alternative: Hypothesis) -> Correction | None:
    before, after = total(reference).acceptance_length, total(alternative.counts).acceptance_length
    pairs = zip(reference, alternative.counts, strict=True)
    drafted = [(a, b) for a, b in pairs if a.verifications and b.verifications]
    if before is None or after is None or len(drafted) < 2:
        return None
    if after <= before or after < before + MATERIAL * (before - 1):
        return None
    old, new = [a for a, _ in drafted], [b for _, b in drafted]
    return Correction(
        cause=alternative.fault.cause,
        setting=alternative.fault.setting or alternative.fault.name,
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


class PairReport(ExaminationReport):
    """Better settings of a pair's checkpoint, and errors of our own engine."""

    reference: AcceptanceFigures
    corrections: list[Correction]  # Settings that would raise acceptance, the best first
    first_difference: str | None


@dataclass
class Examination:
    """Runs probes through a reference and keeps each as it is finished."""

    reference: Reference
    store: Store

    def hypotheses(self) -> list[Hypothesis]:
        """Healthy, and every fault of a server, with their predictions."""
        return self._predict(self.reference.faults())

    def sound(self) -> tuple[AcceptanceStatistics, ...]:
        """Counts that the sound reference predicts, by prompt."""
        return self._predict(())[0].counts

    def alternatives(self) -> list[Hypothesis]:
        """The checkpoint as configured, and every other setting of it, with their predictions."""
        return self._predict(self.reference.settings())

    def examine_suspect(self, observation: Observation) -> SuspectReport:
        """The explanations of a server's acceptance."""
        return diagnose(observation, self.hypotheses())

    def examine_pair(self, first_difference: Callable[[], object | None]) -> PairReport:
        """Looks for better settings of the checkpoint and for errors of our own engine.

        Args:
            first_difference: finds the first wrong tensor; None if there is none.
        """
        sound, *alternatives = self.alternatives()
        found, wrong = corrections(sound.counts, alternatives), first_difference()
        figures, needed = AcceptanceFigures.of(sound.counts), fewest_prompts(len(alternatives))
        sentences = [f"the checkpoint: {correction}" for correction in found[:1]]
        sentences += [f"our own engine: {wrong}"] if wrong else []
        verdict, length = Verdict.FAULT, f"τ = {figures.acceptance_length:.2f}"
        if not sentences and figures.prompts >= needed:
            verdict = Verdict.HEALTHY
            sentences = [f"healthy: {length}, and none of {len(alternatives)} other settings raises it"]
        elif not sentences:
            verdict = Verdict.UNCLEAR
            few = f"{figures.prompts} prompts cannot show that a setting helps, {needed} could"
            sentences = [f"cannot tell: {length}; {few}"]
        return PairReport(
            verdict=verdict,
            sentences=sentences,
            reference=figures,
            corrections=found,
            first_difference=str(wrong) if wrong else None,
            notes=tuple(f"or {correction}" for correction in found[1:4]),
        )

    def _predict(self, faults: Sequence[Fault]) -> list[Hypothesis]:
        """Predictions of the sound reference, then of each fault; those in the store are not made again."""
        predicted = list[Hypothesis]()
        with doing("predicting acceptance", len(faults) + 1) as work:
            for fault in (Fault(HEALTHY, HEALTHY, "as in our own loop"), *faults):
                work.part = name = "as it is" if fault.cause == HEALTHY else fault.name
                kept = self.store.get(name)
                if kept is None:
                    found = self.reference.predict(None if fault.cause == HEALTHY else fault.name)
                    kept = {"counts": [one.to_dict() for one in found.counts], "answers": list(found.answers)}
                    self.store.put(name, kept)
                counts = tuple(map(AcceptanceStatistics.from_dict, kept["counts"]))
                if not predicted and not total(counts).verifications:
                    raise UserError("nothing is drafted: every answer ends at once", where="prompts", do="give others")
                predicted.append(Hypothesis(fault, counts, tuple(kept["answers"])))
                work.advance()
        return predicted
