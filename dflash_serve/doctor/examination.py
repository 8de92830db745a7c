"""The run of an examination from the first probe to the report, of a server or of a pair alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflash_serve.common.settings import Frozen
from dflash_serve.common.store import Store
from dflash_serve.doctor.corrections import Alternative, Correction, corrections, fewest_prompts
from dflash_serve.doctor.diagnosis import HEALTHY, Hypothesis, Verdict, diagnose
from dflash_serve.doctor.evidence import Fault, Observation, Prediction, Reference, length_error
from dflash_serve.errors import UserError
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

SOUND = "as it is"
"""Name of the sound prediction in the store."""


class AcceptanceFigures(Frozen):
    """Acceptance over some prompts."""

    prompts: int
    verifications: float | None
    acceptance_length: float | None
    """τ."""
    error: float | None
    """Standard error of τ over prompts."""
    survival: list[float | None]
    """Survival of slots 1..B-1."""

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
    sentences: list[str]
    """Why, the most important first."""
    notes: tuple[str, ...] = ()


class Observed(Frozen):
    """Acceptance observed of a server."""

    acceptance_length: float
    survival: list[float | None]


class ExplanationRow(Frozen):
    """One explanation of the observation."""

    cause: str
    name: str
    says: str
    """Causes of this fault in an engine or a checkpoint."""
    predicted: AcceptanceFigures
    posterior: float
    p_value: float


class SuspectReport(ExaminationReport):
    """The explanations of a server's acceptance."""

    evidence: str
    """`paired`, `slots` or `length`."""
    observed: Observed
    explanations: list[ExplanationRow]
    """The most probable first."""
    named: list[str]
    """Causes that are probable enough to be named."""
    cannot_be_told_from_healthy: list[str]


class PairReport(ExaminationReport):
    """Better settings of a pair's checkpoint, and errors of our own engine."""

    reference: AcceptanceFigures
    corrections: list[Correction]
    """Settings that would raise acceptance, the best first."""
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
        """The sound prediction, and one under each fault.

        Raises:
            UserError: not even the sound engine drafts anything.
        """
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
