"""The doctor's statistics: against scipy, and in simulation, where the truth is known."""

from __future__ import annotations

import math
import random

import pytest
from scipy import stats

from dflash_serve.proving.doctor.corrections import Alternative, corrections, fewest_prompts
from dflash_serve.proving.doctor.counts import Counts, length_error, total
from dflash_serve.proving.doctor.diagnosis import HEALTHY, Hypothesis, Verdict, diagnose
from dflash_serve.proving.doctor.fit import Observation, _beta_binomial, _chi_square_tail, log_likelihood, p_value
from dflash_serve.speculation.statistics import AcceptanceStatistics

SOUND = (0.6, 0.5, 0.45, 0.4)
"""P(slot k | slot k - 1)."""
BROKEN = (0.4, 0.45, 0.4, 0.4)
SAME_LENGTH = (0.75, 0.25, 0.38, 0.4)
"""Another profile of nearly the same τ."""


def draw(hazards: tuple[float, ...], generator: random.Random, steps: int = 40) -> Counts:
    """One prompt; prompts differ in difficulty."""
    ease = generator.uniform(0.8, 1.2)
    statistics = AcceptanceStatistics()
    for _ in range(steps):
        accepted = 0
        while accepted < len(hazards) and generator.random() < min(0.98, hazards[accepted] * ease):
            accepted += 1
        statistics.record(len(hazards) + 1, accepted)
    return Counts.of(statistics, len(hazards) + 1)


def sample(hazards: tuple[float, ...], seed: int, prompts: int = 16) -> tuple[Counts, ...]:
    generator = random.Random(seed)
    return tuple(draw(hazards, generator) for _ in range(prompts))


def hypotheses(seed: int, **profiles: tuple[float, ...]) -> list[Hypothesis]:
    return [
        Hypothesis(HEALTHY if name == "healthy" else name, name, "", sample(hazards, seed))
        for name, hazards in profiles.items()
    ]


def slots(counts: tuple[Counts, ...]) -> Observation:
    return Observation(total(counts).length, whole=total(counts))


def test_counts_come_from_our_statistics_and_add_up() -> None:
    statistics = AcceptanceStatistics()
    for width, accepted in ((4, 3), (4, 0), (4, 1), (1, 0), (2, 1)):
        statistics.record(width, accepted)
    counts = Counts.of(statistics, 4)
    assert counts == Counts(4, 5, (3, 1, 1))
    assert counts.length == statistics.acceptance_length == 2.25
    assert Counts.from_list(counts.to_list()) == counts
    assert total([counts, Counts(2, 1)]) == Counts(6, 6, None)
    assert total([counts, counts]).reached == (6, 2, 2)


def test_the_error_of_a_length_covers_the_truth() -> None:
    truth = total(sample(SOUND, 0, prompts=4000)).length
    within = [abs(total(c).length - truth) < 2 * (length_error(c) or 0) for c in (sample(SOUND, n) for n in range(200))]
    assert 0.9 <= sum(within) / len(within) <= 0.99


@pytest.mark.parametrize(
    ("tries", "successes", "guesses", "guessed"), [(30, 12, 50, 20), (7, 0, 90, 3), (400, 399, 5, 5)]
)
def test_beta_binomial_is_scipys(tries: int, successes: int, guesses: int, guessed: int) -> None:
    expected = stats.betabinom.logpmf(successes, tries, guessed + 0.5, guesses - guessed + 0.5)
    choices = math.lgamma(tries + 1) - math.lgamma(successes + 1) - math.lgamma(tries - successes + 1)
    assert _beta_binomial(tries, successes, guesses, guessed) + choices == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("square", "freedom"), [(3.0, 3), (12.0, 7), (30.0, 7), (1.0, 5)])
def test_chi_square_tail_is_scipys(square: float, freedom: int) -> None:
    assert _chi_square_tail(square, freedom) == pytest.approx(stats.chi2.sf(square, freedom), rel=0.25)


def test_survival_tells_what_the_length_does_not() -> None:
    right = wrong = 0
    for seed in range(60):
        suspect, known = slots(sample(SAME_LENGTH, seed)), hypotheses(1000 + seed, healthy=SOUND, other=SAME_LENGTH)
        right += log_likelihood(suspect, known[1].predicted) > log_likelihood(suspect, known[0].predicted)
        only = Observation(suspect.length)
        wrong += diagnose(only, known).verdict == Verdict.FAULT
    assert right == 60
    assert wrong == 0


def test_two_hundred_healthy_servers_are_not_called_faulty() -> None:
    verdicts = []
    for seed in range(200):
        known = hypotheses(5000 + seed, healthy=SOUND, broken=BROKEN, other=SAME_LENGTH)
        verdicts.append(diagnose(slots(sample(SOUND, seed)), known).verdict)
    assert verdicts.count(Verdict.FAULT) == 0
    assert verdicts.count(Verdict.HEALTHY) >= 190


def test_two_hundred_broken_servers_are_told_why() -> None:
    named = []
    for seed in range(200):
        known = hypotheses(5000 + seed, healthy=SOUND, broken=BROKEN, other=SAME_LENGTH)
        found = diagnose(slots(sample(BROKEN, seed)), known)
        named.append((found.verdict, found.explanations[0].hypothesis.name))
    assert named.count((Verdict.FAULT, "broken")) >= 195


def test_the_same_prompts_tell_most() -> None:
    known = hypotheses(1, healthy=SOUND, other=sample_like())
    exact = known[1].predicted
    suspect = Observation(total(exact).length, each=exact, whole=total(exact))
    found = diagnose(suspect, known)
    assert found.verdict == Verdict.FAULT
    assert found.sentence.endswith("nothing else comes near")
    assert diagnose(Observation(total(exact).length), known).verdict == Verdict.HEALTHY


def sample_like() -> tuple[float, ...]:
    """So close to sound that only paired prompts show it."""
    return (0.61, 0.5, 0.44, 0.41)


def test_a_figure_that_nothing_predicts_is_not_explained() -> None:
    known = hypotheses(1, healthy=SOUND, broken=BROKEN)
    found = diagnose(Observation(3.9), known)
    assert found.verdict == Verdict.UNCLEAR
    assert "no known fault predicts it" in found.sentence


def test_a_figure_that_says_nothing_is_not_called_healthy() -> None:
    few = [Hypothesis(h.cause, h.name, "", h.predicted[:2]) for h in hypotheses(3, healthy=SOUND, broken=BROKEN)]
    between = (total(few[0].predicted).length + total(few[1].predicted).length) / 2
    assert diagnose(Observation(between), few).verdict == Verdict.UNCLEAR


def test_a_precision_that_costs_little_is_healthy_and_one_that_costs_much_is_not() -> None:
    for hazards, verdict in ((sample_like(), Verdict.HEALTHY), (BROKEN, Verdict.FAULT)):
        known = hypotheses(1, healthy=SOUND, rounded=hazards)
        known[1] = Hypothesis("rounded", "rounded", "", known[1].predicted, benign=True)
        exact = known[1].predicted
        assert diagnose(Observation(total(exact).length, each=exact, whole=total(exact)), known).verdict == verdict


def test_answers_decide_between_prompts() -> None:
    counts = sample(SOUND, 1)
    known = [
        Hypothesis(HEALTHY, HEALTHY, "", counts, answers=("a",) * 16),
        Hypothesis("template", "template", "", counts, answers=("b",) * 16),
    ]
    found = diagnose(Observation(total(counts).length, each=counts, answers=("b",) * 16), known)
    assert (found.verdict, found.named) == (Verdict.FAULT, ("template",))


def test_what_is_never_drafted_explains_nothing() -> None:
    known = [*hypotheses(1, healthy=SOUND), Hypothesis("silent", "silent", "", (Counts(0, 0, (0,) * 4),) * 16)]
    found = diagnose(slots(sample(SOUND, 2)), known)
    assert found.verdict == Verdict.HEALTHY
    assert p_value(slots(sample(SOUND, 2)), known[1].predicted) == 0.0


def test_a_better_setting_is_proposed_and_a_like_one_never() -> None:
    alarms = 0
    for seed in range(40):
        sound = sample(SOUND, seed)
        equals = [Alternative("x", f"{n}", f"x = {n}", sample(SOUND, 900 + 31 * seed + n)) for n in range(6)]
        alarms += bool(corrections(sound, equals))
    assert alarms <= 4
    (found,) = corrections(sample(BROKEN, 1), [Alternative("mask", "mask 3", "mask_token_id = 3", sample(SOUND, 1))])
    assert found.interval[0] < found.after - found.before < found.interval[1]
    assert found.p_value <= 1e-3
    assert "with mask_token_id = 3 τ rises from" in str(found)


def test_too_few_prompts_cannot_be_significant() -> None:
    needed = fewest_prompts(20)
    gains = [Alternative("x", str(n), "x", sample((0.9,) * 4, n, prompts=needed - 1)) for n in range(20)]
    assert corrections(sample(BROKEN, 1, prompts=needed - 1), gains) == []
    gains = [Alternative("x", str(n), "x", sample((0.9,) * 4, n, prompts=needed)) for n in range(20)]
    assert corrections(sample(BROKEN, 1, prompts=needed), gains)
