"""Which explanation fits what was observed: healthy, a fault, several that look alike from outside, or none.

Being healthy has the prior 1/2, and the causes share the rest; variants of a cause share its part. So thirty faults
that all change little cannot outvote a sound server, and a fault is named only where the evidence overcomes that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from dflash_serve.proving.doctor.counts import Counts, total
from dflash_serve.proving.doctor.fit import Observation, log_likelihood, p_value

HEALTHY = "healthy"
NAMED = 0.05
"""Causes at least this probable are named."""
IMPOSSIBLE = 1e-3
"""An explanation whose prediction is this far off explains nothing."""
COSTLY, EXCLUDED = 0.1, 0.2
"""A fault that loses this share of the accepted tokens must not be overlooked: `healthy` asks that all such faults
together are less probable than this. An observation that says nothing leaves them at their prior, the half."""
SAME_ANSWER = 3.0
"""Log-likelihood of an answer that is exactly the expected one: faults of the prompt change the answers."""


class Verdict(StrEnum):
    """What the doctor says; the exit code follows."""

    HEALTHY = "healthy"
    FAULT = "fault"
    UNCLEAR = "could not tell"

    @property
    def exit_code(self) -> int:
        return {"healthy": 0, "fault": 1, "could not tell": 2}[self.value]


@dataclass(frozen=True)
class Hypothesis:
    """One explanation and what it predicts."""

    cause: str
    name: str
    says: str
    predicted: tuple[Counts, ...]
    """By prompt."""
    benign: bool = False
    answers: tuple[str, ...] | None = None
    """The target's answers under it."""


@dataclass(frozen=True)
class Explanation:
    """A hypothesis against the observation."""

    hypothesis: Hypothesis
    posterior: float
    p_value: float

    @property
    def predicted(self) -> Counts:
        """Over all prompts."""
        return total(self.hypothesis.predicted)


@dataclass(frozen=True)
class Diagnosis:
    """The verdict and its reasons."""

    verdict: Verdict
    sentence: str
    explanations: tuple[Explanation, ...]
    """Most probable first; one for each hypothesis."""
    named: tuple[str, ...]
    """The causes that could be it."""
    alike: tuple[str, ...]
    """Faults that this evidence cannot tell from healthy."""


def diagnose(observed: Observation, hypotheses: Sequence[Hypothesis]) -> Diagnosis:
    """The hypotheses must hold one whose cause is `HEALTHY`."""
    posteriors = _posteriors(observed, hypotheses)
    explanations = sorted(
        (Explanation(h, p, p_value(observed, h.predicted)) for h, p in zip(hypotheses, posteriors, strict=True)),
        key=lambda explanation: -explanation.posterior,
    )
    causes: dict[str, float] = {}
    for each in explanations:
        causes[each.hypothesis.cause] = causes.get(each.hypothesis.cause, 0.0) + each.posterior
    named = tuple(sorted((c for c, p in causes.items() if p >= NAMED), key=lambda cause: -causes[cause]))
    sound = sum(each.posterior for each in _sound(explanations))
    alike = _alike(explanations)
    if max(each.p_value for each in explanations if each.hypothesis.cause in named) < IMPOSSIBLE:
        verdict, sentence = Verdict.UNCLEAR, _unknown(observed, explanations)
    elif sound >= 0.5 and _costly(explanations) < EXCLUDED:
        verdict, sentence = Verdict.HEALTHY, _healthy(observed, explanations)
    elif sound < NAMED:
        verdict, sentence = Verdict.FAULT, _fault(observed, explanations, named)
    else:
        verdict, sentence = Verdict.UNCLEAR, _torn(observed, explanations)
    return Diagnosis(verdict, sentence, tuple(explanations), named, alike)


def _posteriors(observed: Observation, hypotheses: Sequence[Hypothesis]) -> list[float]:
    causes = {h.cause for h in hypotheses} - {HEALTHY}
    logs = []
    for hypothesis in hypotheses:
        variants = sum(other.cause == hypothesis.cause for other in hypotheses)
        prior = 0.5 if hypothesis.cause == HEALTHY else 0.5 / len(causes) / variants
        logs.append(math.log(prior) + log_likelihood(observed, hypothesis.predicted) + _answers(observed, hypothesis))
    best = max(logs)
    weights = [math.exp(log - best) for log in logs]
    return [weight / sum(weights) for weight in weights]


def _answers(observed: Observation, hypothesis: Hypothesis) -> float:
    if observed.answers is None or hypothesis.answers is None:
        return 0.0
    pairs = zip(observed.answers, hypothesis.answers, strict=True)
    return SAME_ANSWER * sum(theirs.strip() == expected.strip() for theirs, expected in pairs)


def _loses_much(each: Explanation, explanations: Sequence[Explanation]) -> bool:
    healthy = next(other for other in explanations if other.hypothesis.cause == HEALTHY)
    return not each.predicted.length >= 1 + (1 - COSTLY) * (healthy.predicted.length - 1)


def _sound(explanations: Sequence[Explanation]) -> list[Explanation]:
    """Healthy, and precisions that cost little."""
    return [
        each
        for each in explanations
        if each.hypothesis.cause == HEALTHY or (each.hypothesis.benign and not _loses_much(each, explanations))
    ]


def _costly(explanations: Sequence[Explanation]) -> float:
    """Probability of the faults that lose much."""
    return sum(each.posterior for each in explanations if _loses_much(each, explanations))


def _alike(explanations: Sequence[Explanation]) -> tuple[str, ...]:
    """Faults that predict what healthy predicts, as far as this evidence goes: their odds are nearly their prior's."""
    healthy = next(each for each in explanations if each.hypothesis.cause == HEALTHY)
    causes = len({each.hypothesis.cause for each in explanations}) - 1
    return tuple(
        each.hypothesis.name
        for each in explanations
        if each.hypothesis.cause != HEALTHY and each.posterior * causes >= NAMED * healthy.posterior > 0
    )


def _shown(each: Explanation) -> str:
    return f"*{each.hypothesis.name}* (predicted {each.predicted.length:.2f})"


def _healthy(observed: Observation, explanations: Sequence[Explanation]) -> str:
    reference = next(each for each in explanations if each.hypothesis.cause == HEALTHY)
    text = f"healthy: {observed.length:.2f} fits the reference ({reference.predicted.length:.2f})"
    first = explanations[0]
    return text if first.hypothesis.cause == HEALTHY else f"{text}; {_shown(first)} would explain it, too"


def _fault(observed: Observation, explanations: Sequence[Explanation], named: Sequence[str]) -> str:
    best = [next(each for each in explanations if each.hypothesis.cause == cause) for cause in named]
    text = f"your server's {observed.length:.2f} fits {' or '.join(map(_shown, best))}"
    if len(best) > 1:
        return f"{text}: these cannot be told apart from outside"
    rest = next((each for each in explanations if each.hypothesis.cause not in named), None)
    odds = best[0].posterior / rest.posterior if rest and rest.posterior else math.inf
    if rest is None or odds > 1 / IMPOSSIBLE:
        return f"{text}; nothing else comes near"
    return f"{text}; next, far less likely, {_shown(rest)}"


def _torn(observed: Observation, explanations: Sequence[Explanation]) -> str:
    """Both sides: what would be harmless, and the likeliest faults."""
    harmless = _sound(explanations)
    faults = [each for each in explanations if each not in harmless][:3]
    return (
        f"cannot tell from outside: {observed.length:.2f} fits {_shown(harmless[0])} and faults such as "
        f"{', '.join(map(_shown, faults))}; more prompts would tell more, and a server's own counts (--url) most"
    )


def _unknown(observed: Observation, explanations: Sequence[Explanation]) -> str:
    reference = next(each for each in explanations if each.hypothesis.cause == HEALTHY)
    return (
        f"cannot tell: {observed.length:.2f} is not the reference's {reference.predicted.length:.2f}, "
        f"and no known fault predicts it; the nearest is {_shown(explanations[0])}"
    )
