"""Each pattern of failures has its name, and what proves nothing is not called lossless."""

from __future__ import annotations

import pytest

from dflash_serve.speculation.statistics import AcceptanceStatistics
from dflash_serve.verify.distributions import DistributionComparison
from dflash_serve.verify.questions import GREEDY, LOOKS, SAMPLED, VerifyPlan
from dflash_serve.verify.report import FaultKind, conclude, faults, unproven, unproven_sides, verdict_of
from dflash_serve.verify.tokens import Difference, Kind, TokenComparison

PLAIN, PENALISED = (case.name for case in GREEDY)
FREE = next(case.name for case in SAMPLED if not case.penalised)
HELD = next(case.name for case in SAMPLED if case.penalised)


def tokens(case: str, *kinds: Kind, compared: int = 100) -> TokenComparison:
    differences = tuple(
        Difference(prompt=n + 1, position=3, with_speculation="a", without_speculation="b", gap=None, kind=kind)
        for n, kind in enumerate(kinds)
    )
    counts = {"prompts": 8, "identical": 8 - len(kinds), "tokens": 100, "compared": compared}
    return TokenComparison(case=case, **counts, differences=differences)


def sampled(case: str, *, differs: bool = False, repeats: float = 0.3, samples: int = 256) -> DistributionComparison:
    return DistributionComparison(
        case=case, prompt=1, samples=samples, differs=differs, repeats_with=repeats, repeats_without=0.3
    )


SOUND = [tokens(PLAIN), tokens(PENALISED)]
FINE = [sampled(FREE), sampled(HELD)]


@pytest.mark.parametrize(
    ("greedy", "drawn", "expected"),
    [
        (SOUND, FINE, ()),
        ([tokens(PLAIN, "near-tie"), tokens(PENALISED)], FINE, ()),
        ([tokens(PLAIN, "fault"), tokens(PENALISED, "fault")], [sampled(FREE, differs=True)], (FaultKind.STALE_STATE,)),
        ([tokens(PLAIN), tokens(PENALISED, "fault")], FINE, (FaultKind.PENALTIES,)),
        (SOUND, [sampled(FREE), sampled(HELD, differs=True)], (FaultKind.PENALTIES,)),
        (SOUND, [sampled(FREE, differs=True), sampled(HELD, differs=True)], (FaultKind.DISTRIBUTION,)),
        (SOUND, [sampled(FREE, differs=True, repeats=1.0)], (FaultKind.GREEDY_SAMPLING,)),
        (
            [tokens(PLAIN), tokens(PENALISED, "fault")],
            [sampled(FREE, differs=True)],
            (FaultKind.DISTRIBUTION, FaultKind.PENALTIES),
        ),
    ],
)
def test_what_fails_names_the_fault(
    greedy: list[TokenComparison], drawn: list[DistributionComparison], expected: tuple[FaultKind, ...]
) -> None:
    assert faults(greedy, drawn, None) == expected


def test_one_seeded_answer_may_slip_and_two_may_not() -> None:
    assert faults(SOUND, FINE, tokens("same seeds", "unscored")) == ()
    assert faults(SOUND, FINE, tokens("same seeds", "unscored", "unscored")) == (FaultKind.SEEDS,)


@pytest.mark.parametrize(
    ("greedy", "drawn", "why"),
    [
        ([tokens(PLAIN, "unstable")], FINE, "does not repeat its own answer"),
        ([tokens(PLAIN, "unscored")], FINE, "does not report how close"),
        ([tokens(PLAIN, "near-tie", compared=40)], FINE, "near-ties left 40 of 100"),
        (SOUND, [sampled(FREE, samples=63)], "too few"),
        ([SOUND[0].model_copy(update={"refused": "HTTP 400"})], FINE, "refused"),
        (SOUND, [FINE[0].model_copy(update={"refused": "HTTP 400"})], "--samples 0"),
        ([SOUND[0].model_copy(update={"tokens": 0})], FINE, "no greedy answer has any token"),
    ],
)
def test_what_proves_nothing_could_not_be_told(
    greedy: list[TokenComparison], drawn: list[DistributionComparison], why: str
) -> None:
    reasons = list(unproven(greedy, drawn))
    assert any(why in reason for reason in reasons)
    assert verdict_of((), reasons) == "could not tell"
    assert verdict_of((FaultKind.SEEDS,), reasons) == "not lossless"


COUNTED = AcceptanceStatistics(10, 70, 30)


@pytest.mark.parametrize(
    ("acceptance", "is_plain", "why"),
    [
        (AcceptanceStatistics(10, 70, 0), True, "no drafted token was accepted"),
        (AcceptanceStatistics.unknown(), True, "nothing shows that the side with speculation speculates"),
        (AcceptanceStatistics.unknown("SGLang", 1.0), True, "nothing shows that the side with speculation speculates"),
        (COUNTED, False, "nothing shows that the side without speculation does not speculate"),
    ],
)
def test_sides_that_may_not_be_what_they_are_said_to_be_could_not_be_told(
    acceptance: AcceptanceStatistics, is_plain: bool, why: str
) -> None:
    assert [why in reason for reason in unproven_sides(acceptance, is_plain)] == [True]
    found = conclude(SOUND, FINE, None, acceptance, unit="tokens", is_plain=is_plain)
    assert found.verdict == "could not tell"


@pytest.mark.parametrize("acceptance", [COUNTED, AcceptanceStatistics.unknown("SGLang", 2.5)])
def test_a_sound_engine_leaves_no_doubt_by_counts_or_by_its_own_word(acceptance: AcceptanceStatistics) -> None:
    assert list(unproven(SOUND, FINE)) == []
    assert list(unproven_sides(acceptance, True)) == []
    assert verdict_of((), ()) == "lossless"


def test_the_looks_spend_the_false_alarm_rate_and_no_more() -> None:
    plan = VerifyPlan(prompts=1, prompts_sha256="", max_tokens=8, samples=200, false_alarm=1e-3)
    looks = list(plan.looks)
    assert [samples for samples, _ in looks] == [25, 50, 100, 200]
    assert len(looks) == len(LOOKS)
    assert sum(rate for _, rate in looks) * len(SAMPLED) == pytest.approx(1e-3)
