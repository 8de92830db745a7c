"""Diagnosis: the explanation that fits the observation best, by Bayes' rule: healthy, one fault, several, or none.

`Healthy` has the prior 1/2. The causes share the other half equally, and variants of a cause share its part, so thirty
faults that all change little cannot outvote a sound server.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from dflash_serve.common.settings import Frozen
from dflash_serve.doctor.evidence import Fault, Observation, length_error, log_likelihood, p_value
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

HEALTHY = "healthy"
UNVERIFIED = "verification"  # The cause of an acceptance that is too high
NAMED = 0.05  # Least posterior probability at which a cause is named
IMPOSSIBLE = 1e-3  # p-value below which an explanation is excluded
COSTLY, EXCLUDED = 0.1, 0.2
"""A fault is costly if it loses this share of the accepted tokens. The verdict `healthy` needs a probability of all
costly faults together below the second number; without evidence it is their prior, one half."""
SAME_ANSWER = 3.0  # Log-likelihood of an answer that equals the expected one; faults of the prompt change answers
PERFECT = 64  # Drafted tokens that, if all are accepted, show a fault; the reference must have rejected some


class Verdict(StrEnum):
    """The doctor's verdict, which sets the exit code."""

    HEALTHY = "healthy"
    FAULT = "fault"
    UNCLEAR = "could not tell"

    @property
    def exit_code(self) -> int:
        return {"healthy": 0, "fault": 1, "could not tell": 3}[self.value]


@dataclass(frozen=True)
class Hypothesis:
    """A fault, or none (its cause is `HEALTHY`), and what it predicts."""

    fault: Fault
    counts: tuple[AcceptanceStatistics, ...]  # By prompt
    answers: tuple[str, ...] | None = None  # The target's answers, by prompt


class AcceptanceFigures(Frozen):
    """Acceptance over some prompts."""

    prompts: int
    verifications: float | None
    acceptance_length: float | None  # τ; None if nothing was drafted
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


class Explanation(Frozen):
    """A hypothesis against the observation."""

    cause: str
    name: str
    says: str  # Causes of this fault in an engine or a checkpoint
    benign: bool  # A choice of precision rather than a mistake
    predicted: AcceptanceFigures
    posterior: float  # Probability of the hypothesis, given the observation
    p_value: float  # Probability of an observation as far off as this one, given the hypothesis

    @property
    def is_healthy(self) -> bool:
        return self.cause == HEALTHY

    def __str__(self) -> str:
        return f"*{self.name}* (predicted {_shown(self.predicted)})"


class ExaminationReport(Frozen):
    """The result of an examination."""

    verdict: Verdict
    sentences: list[str]  # Why, the most important first
    notes: tuple[str, ...] = ()


class Observed(Frozen):
    """Acceptance observed of a server."""

    acceptance_length: float
    survival: list[float | None]


class SuspectReport(ExaminationReport):
    """The explanations of a server's acceptance."""

    evidence: str  # `paired`, `slots` or `length`
    observed: Observed
    explanations: list[Explanation]  # The most probable first; one for each hypothesis
    named: list[str]  # Causes that are probable enough to be named
    cannot_be_told_from_healthy: list[str]  # Faults that this evidence cannot tell from healthy


def diagnose(observed: Observation, hypotheses: Sequence[Hypothesis]) -> SuspectReport:
    """Weighs all hypotheses; exactly one of them has the cause `HEALTHY`."""
    explanations = [
        Explanation(
            cause=one.fault.cause,
            name=one.fault.name,
            says=one.fault.says,
            benign=one.fault.benign,
            predicted=AcceptanceFigures.of(one.counts),
            posterior=posterior,
            p_value=p_value(observed, one.counts),
        )
        for one, posterior in zip(hypotheses, _posteriors(observed, hypotheses), strict=True)
    ]
    explanations.sort(key=lambda explanation: -explanation.posterior)
    causes = defaultdict[str, float](float)
    for each in explanations:
        causes[each.cause] += each.posterior
    least = min(NAMED, max(causes.values()) / 2)  # many causes may fit alike, each with little probability
    named = sorted((c for c, p in causes.items() if p >= least), key=lambda cause: -causes[cause])
    sound = next(one for one in hypotheses if one.fault.cause == HEALTHY)
    if _is_too_good(observed, total(sound.counts)):
        verdict, sentence = Verdict.FAULT, _perfect_sentence(observed, AcceptanceFigures.of(sound.counts))
        named = [UNVERIFIED]
    else:
        verdict, sentence = _verdict(observed, explanations, named)
    odds = NAMED * causes[HEALTHY] / (len(causes) - 1 or 1)  # odds near those of the priors
    return SuspectReport(
        verdict=verdict,
        sentences=[sentence],
        evidence=observed.kind,
        observed=Observed(acceptance_length=observed.acceptance_length, survival=observed.whole.survival()),
        explanations=explanations,
        named=named,
        cannot_be_told_from_healthy=[
            each.name for each in explanations if not each.is_healthy and each.posterior >= odds > 0
        ],
    )


def _posteriors(observed: Observation, hypotheses: Sequence[Hypothesis]) -> list[float]:
    of_cause = [one.fault.cause for one in hypotheses]
    causes = len(set(of_cause)) - 1
    logs = []
    for one in hypotheses:
        prior = 0.5 if one.fault.cause == HEALTHY else 0.5 / causes / of_cause.count(one.fault.cause)
        logs.append(math.log(prior) + log_likelihood(observed, one.counts))
        if observed.answers is not None and one.answers is not None:
            pairs = zip(observed.answers, one.answers, strict=True)
            logs[-1] += SAME_ANSWER * sum(theirs.strip() == expected.strip() for theirs, expected in pairs)
    best = max(logs)
    weights = [math.exp(log - best) for log in logs]
    return [weight / sum(weights) for weight in weights]


def _is_too_good(observed: Observation, reference: AcceptanceStatistics) -> bool:
    # Every drafted token was accepted, although the sound drafter loses some.
    whole = observed.whole
    if not whole.drafted or whole.accepted is None or not reference.drafted or reference.accepted is None:
        return False
    return whole.drafted >= PERFECT and whole.accepted == whole.drafted and reference.accepted < reference.drafted


def _verdict(observed: Observation, explanations: Sequence[Explanation], named: Sequence[str]) -> tuple[Verdict, str]:
    first, healthy = explanations[0], next(each for each in explanations if each.is_healthy)
    length, reference = f"{observed.acceptance_length:.2f}", _shown(healthy.predicted)

    def loses_much(each: Explanation) -> bool:  # all accepted tokens are lost if nothing is drafted
        predicted, sound = each.predicted.acceptance_length, healthy.predicted.acceptance_length
        assert sound is not None
        return predicted is None or predicted < 1 + (1 - COSTLY) * (sound - 1)

    # healthy, and precisions that cost little
    harmless = [each for each in explanations if each.is_healthy or (each.benign and not loses_much(each))]
    probability = sum(each.posterior for each in harmless)
    costly = sum(each.posterior for each in explanations if loses_much(each))
    if max(each.p_value for each in explanations if each.cause in named) < IMPOSSIBLE:
        text = f"cannot tell: {length} is not the reference's {reference}, and no known fault predicts it; "
        return Verdict.UNCLEAR, text + f"the nearest is {first}"
    if probability >= 0.5 and costly < EXCLUDED:
        text = f"healthy: {length} fits the reference ({reference})"
        return Verdict.HEALTHY, text if first.is_healthy else f"{text}; {first} would explain it, too"
    if probability < NAMED:
        return Verdict.FAULT, f"your server's {length} fits {_fault_sentence(explanations, named)}"
    faults = ", ".join(str(each) for each in [each for each in explanations if each not in harmless][:3])
    text = f"cannot tell from outside: {length} fits {harmless[0]} and faults such as {faults}; "
    return Verdict.UNCLEAR, text + "more prompts would tell more, and a server's own counts (--url) most"


def _fault_sentence(explanations: Sequence[Explanation], named: Sequence[str]) -> str:
    best = [next(each for each in explanations if each.cause == cause) for cause in named]
    text = " or ".join(map(str, best))
    if len(best) > 1:
        return f"{text}: these cannot be told apart from outside"
    other = next((each for each in explanations if each.cause not in named), None)
    odds = best[0].posterior / other.posterior if other and other.posterior else math.inf
    if other is None or odds > 1 / IMPOSSIBLE:
        return f"{text}; nothing else comes near"
    return f"{text}; next, far less likely, {other}"


def _perfect_sentence(observed: Observation, reference: AcceptanceFigures) -> str:
    return (
        f"all of {observed.whole.drafted:g} drafted tokens were accepted, an acceptance of exactly 1.000 where the "
        f"reference's τ is {_shown(reference)}: no drafter is always right; a verification that compares a block with "
        "itself is, or one whose acceptance is simulated"
    )


def _shown(figures: AcceptanceFigures) -> str:
    return "none" if figures.acceptance_length is None else f"{figures.acceptance_length:.2f}"
