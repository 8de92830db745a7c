"""Each pattern of failures has its name, and what proves nothing is not called lossless."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_serve.speculation.statistics import AcceptanceStatistics
from dflash_serve.verify.distributions import DistributionComparison
from dflash_serve.verify.questions import BIASED, CONTINUED, GREEDY, LOAD, LONG, PENALISED, SAMPLED, STREAMED
from dflash_serve.verify.report import Findings, conclude
from dflash_serve.verify.rules import RuleCheck
from dflash_serve.verify.tokens import Difference, Kind, TokenComparison

PLAIN, WITH_PENALTIES = (case.name for case in GREEDY)
FREE = next(case.name for case in SAMPLED if case.name not in PENALISED)
HELD = next(case.name for case in SAMPLED if case.name in PENALISED)
COUNTED = AcceptanceStatistics(10, 70, 30)


def tokens(case: str, *kinds: Kind, **changes: Any) -> TokenComparison:
    differences = tuple(
        Difference(prompt=n + 1, position=3, with_speculation="a", without_speculation="b", gap=None, kind=kind)
        for n, kind in enumerate(kinds)
    )
    counts = {"prompts": 8, "identical": 8 - len(kinds), "tokens": 100, "compared": 100, **changes}
    return TokenComparison(case=case, **counts, differences=differences)


def sampled(case: str, *, differs: bool = False, repeats: float = 0.3, **changes: Any) -> DistributionComparison:
    fields = {"prompt": 1, "samples": 256, "differs": differs, "repeats_with": repeats, "repeats_without": 0.3}
    return DistributionComparison(case=case, **{**fields, **changes})


def found(*comparisons: TokenComparison | DistributionComparison, **more: Any) -> Findings:
    """The conclusion of these comparisons, and of sound ones of the cases that are not given."""
    cases = {one.case: one for one in (tokens(PLAIN), tokens(WITH_PENALTIES), sampled(FREE), sampled(HELD))}
    cases |= {one.case: one for one in comparisons}
    greedy = tuple(one for one in cases.values() if isinstance(one, TokenComparison))
    drawn = tuple(one for one in cases.values() if isinstance(one, DistributionComparison))
    return conclude(greedy, drawn, more.pop("seeded", None), more.pop("acceptance", COUNTED), unit="tokens", **more)


@pytest.mark.parametrize(
    ("comparisons", "seeded", "expected"),
    [
        ([tokens(PLAIN, "near-tie")], None, ()),
        ([tokens(PLAIN, "fault"), tokens(WITH_PENALTIES, "fault"), sampled(FREE, differs=True)], None, ["stale state"]),
        ([tokens(WITH_PENALTIES, "fault")], None, ["penalties"]),
        ([sampled(HELD, differs=True)], None, ["penalties"]),
        ([sampled(FREE, differs=True), sampled(HELD, differs=True)], None, ["wrong distribution"]),
        ([sampled(FREE, differs=True, repeats=1.0)], None, ["sampling turned greedy"]),
        ([tokens(WITH_PENALTIES, "fault"), sampled(FREE, differs=True)], None, ["wrong distribution", "penalties"]),
        ([], tokens("same seeds", "unscored"), ()),  # one seeded answer may slip
        ([], tokens("same seeds", "unscored", "unscored"), ["seeds"]),
    ],
)
def test_what_fails_names_the_fault(
    comparisons: list[TokenComparison | DistributionComparison], seeded: TokenComparison | None, expected: list[str]
) -> None:
    result = found(*comparisons, seeded=seeded)
    assert list(result.faults) == list(expected)
    assert result.verdict == ("not lossless" if expected else "lossless")


BROKEN = RuleCheck(rule="stop", answers=8, broken=1, example="stop strings, answer 2")
BROKEN_BIAS = BROKEN.model_copy(update={"rule": "logit_bias"})
TOP_K = next(case.name for case in SAMPLED if case.params.top_k)


@pytest.mark.parametrize(
    ("exact", "rules", "differs", "expected", "untested"),
    [
        ([tokens(LOAD.name, "fault")], [], [], ["wrong under load"], ()),
        ([tokens(LOAD.name, "unstable", prompts=100)], [], [], [], ()),  # one in a hundred may be rounding
        ([tokens(STREAMED.name, "fault")], [], [], ["text"], ()),
        ([tokens(LONG.name, "near-tie", compared=16)], [], [], [], ("long answers beyond 16 of 100 tokens",)),
        ([tokens(STREAMED.name, "near-tie", compared=16)], [], [], [], ("streamed beyond 16 of 100 tokens",)),
        ([tokens(LONG.name, "near-tie", compared=16), tokens(CONTINUED[LONG.name].name, "unscored")], [], [], [], ()),
        (
            [tokens(LONG.name, "near-tie"), tokens(CONTINUED[LONG.name].name, "fault")],
            [],
            [],
            ["wrong in long answers"],
            (),
        ),
        ([tokens(CONTINUED[PLAIN].name, "fault")], [], [], ["stale state"], ()),
        ([], [BROKEN], [], ["request field"], ()),
        ([], [BROKEN.model_copy(update={"honoured": False})], [], [], ("stop (not kept without speculation)",)),
        ([], [BROKEN.model_copy(update={"rule": "usage"})], [], ["text"], ()),
        ([], [], [sampled(TOP_K, differs=True)], ["request field"], ()),
        ([], [], [sampled(TOP_K, differs=True), sampled(FREE, differs=True)], ["wrong distribution"], ()),
        ([], [], [sampled(BIASED.name, differs=True)], ["wrong distribution"], ()),
        ([], [BROKEN_BIAS], [sampled(BIASED.name, differs=True)], ["request field"], ()),
    ],
)
def test_fields_text_and_load_have_their_own_faults(
    exact: list[TokenComparison],
    rules: list[RuleCheck],
    differs: list[DistributionComparison],
    expected: list[str],
    untested: tuple[str, ...],
) -> None:
    result = found(*differs, exact=tuple(exact), rules=tuple(rules))
    assert (list(result.faults), result.scope) == (expected, untested)
    assert result.verdict == ("not lossless" if expected else "lossless")


@pytest.mark.parametrize(
    ("comparisons", "rules", "place"),
    [
        ([], [BROKEN], "request field (stop: stop strings, answer 2)"),
        ([sampled(TOP_K, differs=True)], [BROKEN], "request field (temperature 2, top-k 2, prompt 1)"),
        ([tokens(PLAIN, "near-tie", "fault")], [], "stale state (greedy, prompt 2, position 3)"),
    ],
)
def test_the_headline_names_a_case_and_an_example(comparisons: list[Any], rules: list[RuleCheck], place: str) -> None:
    assert found(*comparisons, rules=tuple(rules)).headline == f"not lossless: {place}"


def test_answers_that_near_ties_cut_short_are_told_or_compared_behind_them() -> None:
    cut_short = {case: tokens(case, "near-tie", compared=16) for case in (PLAIN, WITH_PENALTIES)}
    assert found(cut_short[PLAIN]).verdict == "could not tell"
    assert found(cut_short[PLAIN], exact=(tokens(CONTINUED[PLAIN].name, compared=60),)).verdict == "lossless"
    penalised = found(cut_short[WITH_PENALTIES])
    assert (penalised.verdict, penalised.scope) == ("lossless", (f"{WITH_PENALTIES} beyond 16 of 100 tokens",))


def test_what_is_refused_with_penalties_leaves_the_verdict_to_the_other_cases() -> None:
    assert found(tokens(WITH_PENALTIES, refused="HTTP 400")).verdict == "lossless"


@pytest.mark.parametrize(
    ("comparison", "why"),
    [
        (tokens(PLAIN, "unstable"), "does not repeat its own answer"),
        (tokens(PLAIN, "unscored"), "does not report how close"),
        (tokens(PLAIN, "near-tie", compared=40), "near-ties left 40 of 100"),
        (tokens(PLAIN, refused="HTTP 400"), "refused"),
        (sampled(FREE, samples=63), "63 samples a side are too few"),
        (sampled(FREE, refused="HTTP 400"), "--samples 0"),
    ],
)
def test_what_proves_nothing_could_not_be_told(comparison: TokenComparison | DistributionComparison, why: str) -> None:
    result = found(comparison)
    assert [why in reason for reason in result.reasons] == [True]
    assert result.verdict == "could not tell"
    faulty = found(comparison, seeded=tokens("same seeds", "unscored", "unscored"))
    assert (faulty.verdict, faulty.reasons) == ("not lossless", result.reasons)


def test_answers_without_a_token_prove_nothing() -> None:
    reasons = found(tokens(PLAIN, tokens=0), tokens(WITH_PENALTIES, tokens=0)).reasons
    assert reasons == ("no greedy answer has any token",)


def test_a_case_that_only_speculation_fails_in_leaves_the_verdict_open() -> None:
    assert found(failed=("short answers under load: failed",)).verdict == "could not tell"


@pytest.mark.parametrize(
    ("acceptance", "is_plain", "why"),
    [
        (AcceptanceStatistics(10, 70, 0), True, "no drafted token was accepted"),
        (AcceptanceStatistics.unknown(), True, "nothing shows that the side with speculation speculates"),
        (AcceptanceStatistics.unknown("SGLang", 1.0), True, "nothing shows that the side with speculation speculates"),
        (COUNTED, False, "nothing shows that the side without speculation does not speculate"),
        (AcceptanceStatistics.unknown("SGLang", 2.5), True, None),  # by its own word
    ],
)
def test_sides_that_may_not_be_what_they_are_said_to_be_could_not_be_told(
    acceptance: AcceptanceStatistics, is_plain: bool, why: str | None
) -> None:
    result = found(acceptance=acceptance, is_plain=is_plain)
    assert [(why or "") in reason for reason in result.reasons] == [True] * (why is not None)
    assert result.verdict == ("could not tell" if why else "lossless")
