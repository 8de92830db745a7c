"""The run of an examination from the first probe to the report, and corrections of a checkpoint that explain faults.

Corrections compare two settings on the same prompts, so each prompt is its own control: under the null hypothesis its
difference in τ is as likely positive as negative (the sign-flip test). Bonferroni's correction accounts for the number
of settings that were tried. No server is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from dflash_serve.common.settings import Frozen
from dflash_serve.common.store import Store
from dflash_serve.doctor.diagnosis import HEALTHY, Hypothesis, Verdict, diagnose
from dflash_serve.doctor.evidence import Fault, Observation, Prediction, Reference, known_counts, length_error
from dflash_serve.errors import UserError
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

FALSE_ALARMS = 0.05  # Probability that a correction is proposed although none helps
MATERIAL = 0.1  # Least relative gain of a correction in accepted drafted tokens per step

FLIPS = 4096  # Sign patterns of the sign-flip test: all of them up to 12 prompts; beyond, so many random ones
RESAMPLES = 1000  # Bootstrap samples of the prompts for an interval

Counts = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Alternative:
    """Another setting and its predicted acceptance."""

    cause: str
    setting: str
    predicted: tuple[AcceptanceStatistics, ...]  # Predicted counts, by prompt


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


SOUND = "as it is"  # Name of the sound prediction in the store


class AcceptanceFigures(Frozen):
    """Acceptance over some prompts."""

    prompts: int
    verifications: float | None
    acceptance_length: float | None  # τ
    error: float | None  # Standard error of τ over prompts
    survival: list[float | None]  # Survival of slots 1..B-1

    @classmethod
    def of(cls, each: Sequence[AcceptanceStatistics]) -> AcceptanceFigures:
        """The figures of counts by prompt."""
        whole = total(each)
        return cls(
            prompts=len(each),
            verifications=whole.verifications,
            acceptance_length=whole.acceptance_length,
            error=length_error(each),
            survival=whole.survival(),
        )


class ExaminationReport(Frozen):
    """The result of an examination."""

    verdict: Verdict
    sentences: list[str]  # Why, the most important first
    notes: tuple[str, ...] = ()


class Observed(Frozen):
    """Acceptance observed of a server."""

    acceptance_length: float
    survival: list[float | None]


class ExplanationRow(Frozen):
    """One explanation of the observation."""

    cause: str
    name: str
    says: str  # Causes of this fault in an engine or a checkpoint
    predicted: AcceptanceFigures
    posterior: float
    p_value: float


class SuspectReport(ExaminationReport):
    """The explanations of a server's acceptance."""

    evidence: str  # `paired`, `slots` or `length`
    observed: Observed
    explanations: list[ExplanationRow]  # The most probable first
    named: list[str]  # Causes that are probable enough to be named
    cannot_be_told_from_healthy: list[str]


class PairReport(ExaminationReport):
    """Better settings of a pair's checkpoint, and errors of our own engine."""

    reference: AcceptanceFigures
    corrections: list[Correction]  # Settings that would raise acceptance, the best first
    first_difference: str | None


@dataclass
class Examination:
    """Runs probes through a reference and keeps each as it is finished.

    Args:
        show: called with the name of the probe that is about to run, and how many there are in all.
    """

    reference: Reference
    store: Store
    show: Callable[[str, int], None] = lambda name, count: None

    def hypotheses(self) -> list[Hypothesis]:
        """Healthy, and every fault of a server, with what each predicts."""
        sound, found = self._predictions(self.reference.faults())
        healthy = Hypothesis(HEALTHY, HEALTHY, "as in our own loop", sound.counts, answers=sound.answers)
        return [
            healthy,
            *(Hypothesis(f.cause, f.name, f.says, one.counts, f.benign, one.answers) for f, one in found),
        ]

    def alternatives(self) -> tuple[Prediction, list[Alternative]]:
        """The prediction as configured, and every other setting of the checkpoint."""
        sound, found = self._predictions(self.reference.settings())
        return sound, [Alternative(f.cause, f.setting or f.name, one.counts) for f, one in found]

    def examine_suspect(self, observation: Observation) -> SuspectReport:
        """The explanations of a server's acceptance."""
        diagnosis = diagnose(observation, self.hypotheses())
        return SuspectReport(
            verdict=diagnosis.verdict,
            sentences=[diagnosis.sentence],
            evidence=observation.kind,
            observed=Observed(acceptance_length=observation.acceptance_length, survival=observation.whole.survival()),
            explanations=[
                ExplanationRow(
                    cause=each.hypothesis.cause,
                    name=each.hypothesis.name,
                    says=each.hypothesis.says,
                    predicted=AcceptanceFigures.of(each.hypothesis.predicted),
                    posterior=each.posterior,
                    p_value=each.p_value,
                )
                for each in diagnosis.explanations
            ],
            named=list(diagnosis.named),
            cannot_be_told_from_healthy=list(diagnosis.alike),
        )

    def examine_pair(self, first_difference: Callable[[], object | None]) -> PairReport:
        """Looks for better settings of the checkpoint and for errors of our own engine.

        Args:
            first_difference: finds the first wrong tensor; None if there is none.
        """
        sound, alternatives = self.alternatives()
        found, wrong = corrections(sound.counts, alternatives), first_difference()
        sentences = [f"the checkpoint: {correction}" for correction in found[:1]]
        sentences += [f"our own engine: {wrong}"] if wrong else []
        verdict, otherwise = _without_findings(AcceptanceFigures.of(sound.counts), len(alternatives))
        return PairReport(
            verdict=Verdict.FAULT if sentences else verdict,
            sentences=sentences or [otherwise],
            reference=AcceptanceFigures.of(sound.counts),
            corrections=found,
            first_difference=str(wrong) if wrong else None,
            notes=tuple(f"or {correction}" for correction in found[1:4]),
        )

    def _predictions(self, faults: Sequence[Fault]) -> tuple[Prediction, list[tuple[Fault, Prediction]]]:
        count = len(faults) + 1
        sound = self._kept(None, count)
        if not total(sound.counts).verifications:
            raise UserError("nothing is drafted: every answer ends at once", where="prompts", do="give others")
        return sound, [(fault, self._kept(fault.name, count)) for fault in faults]

    def _kept(self, fault: str | None, count: int) -> Prediction:
        name = fault or SOUND
        self.show(name, count)
        kept = self.store.get(name)
        if kept is None:
            prediction = self.reference.predict(fault)
            kept = {"counts": [one.to_dict() for one in prediction.counts], "answers": list(prediction.answers)}
            self.store.put(name, kept)
        return Prediction(tuple(map(AcceptanceStatistics.from_dict, kept["counts"])), tuple(kept["answers"]))


def _without_findings(figures: AcceptanceFigures, settings: int) -> tuple[Verdict, str]:
    length, needed = f"τ = {figures.acceptance_length:.2f}", fewest_prompts(settings)
    if figures.prompts >= needed:
        return Verdict.HEALTHY, f"healthy: {length}, and none of {settings} other settings raises it"
    text = f"cannot tell: {length}; {figures.prompts} prompts cannot show that a setting helps, {needed} could"
    return Verdict.UNCLEAR, text
