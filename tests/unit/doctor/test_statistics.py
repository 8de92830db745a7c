"""The doctor's statistics, in simulation, where the truth is known."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from dflash_serve.doctor.diagnosis import HEALTHY, Hypothesis, Verdict, diagnose
from dflash_serve.doctor.evidence import Fault, Observation, length_error, log_likelihood, p_value
from dflash_serve.doctor.examination import corrections, fewest_prompts, gain_interval, gain_p_value
from dflash_serve.speculation.statistics import AcceptanceStatistics, total

SOUND = (0.6, 0.5, 0.45, 0.4)
"""P(slot k | slot k - 1)."""
ALIKE = (0.61, 0.5, 0.44, 0.41)
"""So close to sound that only paired prompts show it."""
BROKEN = (0.4, 0.45, 0.4, 0.4)
SAME_LENGTH = (0.75, 0.25, 0.38, 0.4)
"""Another profile of nearly the same τ."""


def draw(hazards: tuple[float, ...], generator: random.Random, steps: int = 40) -> AcceptanceStatistics:
    """One prompt; prompts differ in difficulty."""
    ease = generator.uniform(0.8, 1.2)
    statistics = AcceptanceStatistics()
    for _ in range(steps):
        accepted = 0
        while accepted < len(hazards) and generator.random() < min(0.98, hazards[accepted] * ease):
            accepted += 1
        statistics.record(len(hazards) + 1, accepted)
    return statistics


def sample(hazards: tuple[float, ...], seed: int, prompts: int = 16) -> tuple[AcceptanceStatistics, ...]:
    generator = random.Random(seed)
    return tuple(draw(hazards, generator) for _ in range(prompts))


def hypothesis(
    name: str, counts: tuple[AcceptanceStatistics, ...], answers: tuple[str, ...] | None = None, *, benign: bool = False
) -> Hypothesis:
    return Hypothesis(Fault(name, name, "", benign=benign), counts, answers)


def hypotheses(seed: int, **profiles: tuple[float, ...]) -> list[Hypothesis]:
    return [hypothesis(name, sample(hazards, seed)) for name, hazards in profiles.items()]


def setting(name: str, counts: tuple[AcceptanceStatistics, ...]) -> Hypothesis:
    return Hypothesis(Fault("x", name, "", setting=name), counts)


def paired(counts: tuple[AcceptanceStatistics, ...], answers: tuple[str, ...] | None = None) -> Observation:
    return Observation(total(counts), counts, answers)


def tau(counts: tuple[AcceptanceStatistics, ...]) -> float:
    length = total(counts).acceptance_length
    assert length is not None
    return length


def slots(counts: tuple[AcceptanceStatistics, ...]) -> Observation:
    return Observation(total(counts))


def test_evidence_is_as_good_as_what_is_known() -> None:
    counts = sample(SOUND, 0)
    assert Observation(total(counts), counts).kind == "paired"
    assert Observation(total(counts)).kind == "slots"
    assert Observation(AcceptanceStatistics(40, 160, 60, None, None, None)).kind == "length"
    assert Observation.of_length(2.5).kind == "length"
    assert Observation.of_length(2.5).acceptance_length == 2.5


def test_paired_prompts_are_compared_without_slots_where_those_are_unknown() -> None:
    counts = sample(SOUND, 0)
    coarse = tuple(AcceptanceStatistics(c.verifications, None, c.accepted, None, None, None) for c in counts)
    observed = Observation(total(coarse), coarse)
    assert log_likelihood(observed, counts) == 0
    assert log_likelihood(observed, sample(SOUND, 1)) < 0


def test_the_error_of_a_length_covers_the_truth() -> None:
    truth = tau(sample(SOUND, 0, prompts=4000))
    within = [abs(tau(c) - truth) < 2 * (length_error(c) or 0) for c in (sample(SOUND, n) for n in range(200))]
    assert 0.9 <= fmean(within) <= 0.99


def test_a_p_value_is_small_as_rarely_as_it_says() -> None:
    values = [p_value(slots(sample(SOUND, seed)), sample(SOUND, 7000 + seed)) for seed in range(200)]
    assert fmean(value <= 0.05 for value in values) <= 0.1
    assert max(p_value(slots(sample(BROKEN, seed)), sample(SOUND, 7000 + seed)) for seed in range(20)) < 0.05


@pytest.mark.parametrize("prompts", [8, 16])
def test_a_gain_that_is_none_is_significant_as_rarely_as_it_says(prompts: int) -> None:
    pairs = [(sample(SOUND, n, prompts), sample(SOUND, 3000 + n, prompts)) for n in range(200)]
    assert fmean(gain_p_value(*pair) <= 0.1 for pair in pairs) <= 0.16
    truth_within = [low < 0 < high for low, high in (gain_interval(*pair) for pair in pairs)]
    assert 0.85 <= fmean(truth_within) <= 0.99


def test_survival_tells_what_the_length_does_not() -> None:
    right = wrong = 0
    for seed in range(60):
        suspect, known = slots(sample(SAME_LENGTH, seed)), hypotheses(1000 + seed, healthy=SOUND, other=SAME_LENGTH)
        right += log_likelihood(suspect, known[1].counts) > log_likelihood(suspect, known[0].counts)
        only = Observation.of_length(suspect.acceptance_length)
        wrong += diagnose(only, known).verdict == Verdict.FAULT
    assert right == 60
    assert wrong == 0


def test_of_two_hundred_servers_healthy_ones_are_not_called_faulty_and_broken_ones_are_told_why() -> None:
    healthy, broken = [], []
    for seed in range(200):
        known = hypotheses(5000 + seed, healthy=SOUND, broken=BROKEN, other=SAME_LENGTH)
        healthy.append(diagnose(slots(sample(SOUND, seed)), known).verdict)
        found = diagnose(slots(sample(BROKEN, seed)), known)
        broken.append((found.verdict, found.explanations[0].name))
    assert healthy.count(Verdict.FAULT) == 0
    assert healthy.count(Verdict.HEALTHY) >= 190
    assert broken.count((Verdict.FAULT, "broken")) >= 195


def test_the_same_prompts_tell_most() -> None:
    known = hypotheses(1, healthy=SOUND, other=ALIKE)
    found = diagnose(paired(known[1].counts), known)
    assert found.verdict == Verdict.FAULT
    assert found.sentences[0].endswith("nothing else comes near")
    assert diagnose(Observation.of_length(tau(known[1].counts)), known).verdict == Verdict.HEALTHY


def test_a_figure_that_nothing_predicts_is_not_explained() -> None:
    known = hypotheses(1, healthy=SOUND, broken=BROKEN)
    found = diagnose(Observation.of_length(3.9), known)
    assert found.verdict == Verdict.UNCLEAR
    assert "no known fault predicts it" in found.sentences[0]


def test_a_figure_that_says_nothing_is_not_called_healthy() -> None:
    few = [Hypothesis(one.fault, one.counts[:2]) for one in hypotheses(3, healthy=SOUND, broken=BROKEN)]
    between = (tau(few[0].counts) + tau(few[1].counts)) / 2
    assert diagnose(Observation.of_length(between), few).verdict == Verdict.UNCLEAR


def test_many_causes_that_fit_alike_are_all_named() -> None:
    broken = sample(BROKEN, 2)
    known = [hypothesis(HEALTHY, sample(SOUND, 1)), *(hypothesis(f"cause {n}", broken) for n in range(40))]
    found = diagnose(paired(broken), known)
    assert found.verdict == Verdict.FAULT
    assert len(found.named) == 40
    assert found.sentences[0].endswith("these cannot be told apart from outside")


def test_a_precision_that_costs_little_is_healthy_and_one_that_costs_much_is_not() -> None:
    for hazards, verdict in ((ALIKE, Verdict.HEALTHY), (BROKEN, Verdict.FAULT)):
        known = [hypothesis(HEALTHY, sample(SOUND, 1)), hypothesis("rounded", sample(hazards, 1), benign=True)]
        assert diagnose(paired(known[1].counts), known).verdict == verdict


def test_answers_decide_between_prompts() -> None:
    counts = sample(SOUND, 1)
    known = [hypothesis(HEALTHY, counts, ("a",) * 16), hypothesis("template", counts, ("b",) * 16)]
    found = diagnose(paired(counts, ("b",) * 16), known)
    assert (found.verdict, found.named) == (Verdict.FAULT, ["template"])


def test_what_is_never_drafted_explains_nothing() -> None:
    silent = hypothesis("silent", (AcceptanceStatistics(),) * 16)
    observed = slots(sample(SOUND, 2))
    assert diagnose(observed, [*hypotheses(1, healthy=SOUND), silent]).verdict == Verdict.HEALTHY
    assert p_value(observed, silent.counts) == 0.0


def test_acceptance_of_exactly_one_is_no_good_drafter() -> None:
    def counts(accepted: int, steps: int = 40) -> tuple[AcceptanceStatistics, ...]:
        made = AcceptanceStatistics()
        made.record(4, accepted, steps)
        return (made,)

    known = [hypothesis(HEALTHY, counts(2)), hypothesis("norm", counts(0))]
    found = diagnose(paired(counts(3)), known)
    assert (found.verdict, found.named) == (Verdict.FAULT, ["verification"])
    assert "all of 120 drafted tokens were accepted, an acceptance of exactly 1.000" in found.sentences[0]
    assert diagnose(paired(counts(3, steps=4)), known).named != ["verification"]
    known[0] = hypothesis(HEALTHY, counts(3))
    assert diagnose(paired(counts(3)), known).verdict is Verdict.HEALTHY


def test_a_better_setting_is_proposed_and_a_like_one_never() -> None:
    alarms = 0
    for seed in range(40):
        sound = sample(SOUND, seed)
        equals = [setting(f"x = {n}", sample(SOUND, 900 + 31 * seed + n)) for n in range(6)]
        alarms += bool(corrections(sound, equals))
    assert alarms <= 4
    (found,) = corrections(sample(BROKEN, 1), [setting("mask_token_id = 3", sample(SOUND, 1))])
    assert found.gain_95[0] < found.after - found.before < found.gain_95[1]
    assert found.p_value <= 1e-3
    assert "with mask_token_id = 3 τ rises from" in str(found)


def test_too_few_prompts_cannot_be_significant() -> None:
    needed = fewest_prompts(20)
    gains = [setting("x", sample((0.9,) * 4, n, prompts=needed - 1)) for n in range(20)]
    assert corrections(sample(BROKEN, 1, prompts=needed - 1), gains) == []
    gains = [setting("x", sample((0.9,) * 4, n, prompts=needed)) for n in range(20)]
    assert corrections(sample(BROKEN, 1, prompts=needed), gains)
