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
from functools import cached_property

from dflash_serve.doctor.evidence import Observation, log_likelihood, p_value
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
    """One explanation with its predictions."""

    cause: str  # Subject of the fault; `HEALTHY` for none
    name: str
    says: str  # Causes of this fault in an engine or a checkpoint
    predicted: tuple[AcceptanceStatistics, ...]  # Predicted counts, by prompt
    benign: bool = False  # A choice of precision rather than a mistake
    answers: tuple[str, ...] | None = None  # The target's answers, by prompt

    @cached_property
    def acceptance_length(self) -> float | None:
        """Predicted τ over all prompts; None if nothing would be drafted."""
        return total(self.predicted).acceptance_length

    @property
    def shown_length(self) -> str:
        """Predicted τ with two decimals."""
        return "none" if self.acceptance_length is None else f"{self.acceptance_length:.2f}"


@dataclass(frozen=True)
class Explanation:
    """A hypothesis against the observation."""

    hypothesis: Hypothesis
    posterior: float  # Probability of the hypothesis, given the observation
    p_value: float  # Probability of an observation as far off as this one, given the hypothesis

    @property
    def is_healthy(self) -> bool:
        return self.hypothesis.cause == HEALTHY

    def __str__(self) -> str:
        return f"*{self.hypothesis.name}* (predicted {self.hypothesis.shown_length})"


@dataclass(frozen=True)
class Diagnosis:
    """The verdict and its reasons."""

    verdict: Verdict
    sentence: str
    explanations: tuple[Explanation, ...]  # Most probable first; one for each hypothesis
    named: tuple[str, ...]  # Causes that are probable enough to be named
    alike: tuple[str, ...]  # Faults that this evidence cannot tell from healthy


def diagnose(observed: Observation, hypotheses: Sequence[Hypothesis]) -> Diagnosis:
    """Weighs all hypotheses; exactly one of them has the cause `HEALTHY`."""
    posteriors = _posteriors(observed, hypotheses)
    explanations = sorted(
        (Explanation(h, p, p_value(observed, h.predicted)) for h, p in zip(hypotheses, posteriors, strict=True)),
        key=lambda explanation: -explanation.posterior,
    )
    named = _named(explanations)
    harmless = sum(each.posterior for each in _harmless(explanations))
    costly = sum(each.posterior for each in explanations if _loses_much(each, explanations))
    if _is_too_good(observed, _healthy(explanations).hypothesis):
        verdict, sentence = Verdict.FAULT, _perfect_sentence(observed, _healthy(explanations).hypothesis)
        named = (UNVERIFIED,)
    elif max(each.p_value for each in explanations if each.hypothesis.cause in named) < IMPOSSIBLE:
        verdict, sentence = Verdict.UNCLEAR, _unknown_sentence(observed, explanations)
    elif harmless >= 0.5 and costly < EXCLUDED:
        verdict, sentence = Verdict.HEALTHY, _healthy_sentence(observed, explanations)
    elif harmless < NAMED:
        verdict, sentence = Verdict.FAULT, _fault_sentence(observed, explanations, named)
    else:
        verdict, sentence = Verdict.UNCLEAR, _undecided_sentence(observed, explanations)
    return Diagnosis(verdict, sentence, tuple(explanations), named, _alike(explanations))


def _is_too_good(observed: Observation, sound: Hypothesis) -> bool:
    # Every drafted token was accepted, although the sound drafter loses some.
    whole, reference = observed.whole, total(sound.predicted)
    if not whole.drafted or whole.accepted is None or not reference.drafted or reference.accepted is None:
        return False
    return whole.drafted >= PERFECT and whole.accepted == whole.drafted and reference.accepted < reference.drafted


def _posteriors(observed: Observation, hypotheses: Sequence[Hypothesis]) -> list[float]:
    causes = {h.cause for h in hypotheses} - {HEALTHY}
    logs = []
    for hypothesis in hypotheses:
        variants = sum(other.cause == hypothesis.cause for other in hypotheses)
        prior = 0.5 if hypothesis.cause == HEALTHY else 0.5 / len(causes) / variants
        evidence = log_likelihood(observed, hypothesis.predicted) + _answers_log_likelihood(observed, hypothesis)
        logs.append(math.log(prior) + evidence)
    best = max(logs)
    weights = [math.exp(log - best) for log in logs]
    return [weight / sum(weights) for weight in weights]


def _answers_log_likelihood(observed: Observation, hypothesis: Hypothesis) -> float:
    if observed.answers is None or hypothesis.answers is None:
        return 0.0
    pairs = zip(observed.answers, hypothesis.answers, strict=True)
    return SAME_ANSWER * sum(theirs.strip() == expected.strip() for theirs, expected in pairs)


def _named(explanations: Sequence[Explanation]) -> tuple[str, ...]:
    causes = defaultdict[str, float](float)
    for each in explanations:
        causes[each.hypothesis.cause] += each.posterior
    return tuple(sorted((c for c, p in causes.items() if p >= NAMED), key=lambda cause: -causes[cause]))


def _healthy(explanations: Sequence[Explanation]) -> Explanation:
    return next(each for each in explanations if each.is_healthy)


def _loses_much(each: Explanation, explanations: Sequence[Explanation]) -> bool:
    # All accepted tokens are lost if nothing is drafted.
    length, sound = each.hypothesis.acceptance_length, _healthy(explanations).hypothesis.acceptance_length
    assert sound is not None
    return length is None or length < 1 + (1 - COSTLY) * (sound - 1)


def _harmless(explanations: Sequence[Explanation]) -> list[Explanation]:
    # healthy, and precisions that cost little
    return [
        each
        for each in explanations
        if each.is_healthy or (each.hypothesis.benign and not _loses_much(each, explanations))
    ]


def _alike(explanations: Sequence[Explanation]) -> tuple[str, ...]:
    # This evidence does not tell these faults from healthy: their odds are nearly those of their priors.
    healthy = _healthy(explanations).posterior
    causes = len({each.hypothesis.cause for each in explanations}) - 1
    return tuple(
        each.hypothesis.name
        for each in explanations
        if not each.is_healthy and each.posterior * causes >= NAMED * healthy > 0
    )


def _healthy_sentence(observed: Observation, explanations: Sequence[Explanation]) -> str:
    reference, first = _healthy(explanations).hypothesis, explanations[0]
    text = f"healthy: {observed.acceptance_length:.2f} fits the reference ({reference.shown_length})"
    return text if first.is_healthy else f"{text}; {first} would explain it, too"


def _fault_sentence(observed: Observation, explanations: Sequence[Explanation], named: Sequence[str]) -> str:
    best = [next(each for each in explanations if each.hypothesis.cause == cause) for cause in named]
    text = f"your server's {observed.acceptance_length:.2f} fits {' or '.join(map(str, best))}"
    if len(best) > 1:
        return f"{text}: these cannot be told apart from outside"
    other = next((each for each in explanations if each.hypothesis.cause not in named), None)
    odds = best[0].posterior / other.posterior if other and other.posterior else math.inf
    if other is None or odds > 1 / IMPOSSIBLE:
        return f"{text}; nothing else comes near"
    return f"{text}; next, far less likely, {other}"


def _perfect_sentence(observed: Observation, sound: Hypothesis) -> str:
    return (
        f"all of {observed.whole.drafted:g} drafted tokens were accepted, an acceptance of exactly 1.000 where the "
        f"reference's τ is {sound.shown_length}: no drafter is always right; a verification that compares a block with "
        "itself is, or one whose acceptance is simulated"
    )


def _undecided_sentence(observed: Observation, explanations: Sequence[Explanation]) -> str:
    harmless = _harmless(explanations)
    faults = [each for each in explanations if each not in harmless][:3]
    return (
        f"cannot tell from outside: {observed.acceptance_length:.2f} fits {harmless[0]} and faults such as "
        f"{', '.join(map(str, faults))}; more prompts would tell more, and a server's own counts (--url) most"
    )


def _unknown_sentence(observed: Observation, explanations: Sequence[Explanation]) -> str:
    reference = _healthy(explanations).hypothesis
    return (
        f"cannot tell: {observed.acceptance_length:.2f} is not the reference's {reference.shown_length}, "
        f"and no known fault predicts it; the nearest is {explanations[0]}"
    )
