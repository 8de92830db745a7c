"""Each pattern of failures has its name, and what proves nothing is not called lossless."""

from __future__ import annotations

import pytest

from dflash_serve.verify.distributions import DistributionComparison
from dflash_serve.verify.questions import GREEDY, LOOKS, SAMPLED, VerifyPlan
from dflash_serve.verify.report import FaultKind, doubts, faults, verdict_of
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
    ("greedy", "drawn", "accepted", "why"),
    [
        ([tokens(PLAIN, "unstable")], FINE, 9.0, "does not repeat its own answer"),
        ([tokens(PLAIN, "unscored")], FINE, 9.0, "does not say how close"),
        ([tokens(PLAIN, "near-tie", compared=40)], FINE, 9.0, "near-ties left 40 of 100"),
        (SOUND, [sampled(FREE, samples=63)], 9.0, "too few"),
        (SOUND, FINE, 0.0, "no drafted token was accepted"),
        ([SOUND[0].model_copy(update={"refused": "HTTP 400"})], FINE, 9.0, "refused"),
        (SOUND, [FINE[0].model_copy(update={"refused": "HTTP 400"})], 9.0, "--samples 0"),
        ([SOUND[0].model_copy(update={"tokens": 0})], FINE, 9.0, "no greedy answer has any token"),
    ],
)
def test_what_proves_nothing_could_not_be_told(
    greedy: list[TokenComparison], drawn: list[DistributionComparison], accepted: float, why: str
) -> None:
    reasons = list(doubts(greedy, drawn, accepted))
    assert any(why in reason for reason in reasons)
    assert verdict_of((), reasons) == "could not tell"
    assert verdict_of((FaultKind.SEEDS,), reasons) == "not lossless"


def test_a_sound_engine_leaves_no_doubt_even_if_it_does_not_count_acceptance() -> None:
    assert list(doubts(SOUND, FINE, None)) == []
    assert verdict_of((), ()) == "lossless"


def test_the_looks_spend_the_false_alarm_rate_and_no_more() -> None:
    plan = VerifyPlan(prompts=1, prompts_sha256="", max_tokens=8, samples=200, false_alarm=1e-3)
    looks = list(plan.looks)
    assert [samples for samples, _ in looks] == [25, 50, 100, 200]
    assert len(looks) == len(LOOKS)
    assert sum(rate for _, rate in looks) * len(SAMPLED) == pytest.approx(1e-3)
