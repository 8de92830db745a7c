"""The result of a verification: kinds of fault, the verdict, the report, and its form on a terminal.

| failed comparisons | fault | meaning |
|---|---|---|
| greedy answers without penalties | stale state | the target read other tokens than the accepted ones: K/V of rejected tokens kept, wrong positions, tokens committed that were not accepted. All sampled comparisons fail with it, so no other fault is named. |
| greedy answers, but only with penalties | penalties | penalties inside a block do not count the block's own tokens |
| sampled answers, and with speculation alone a beginning determines its next token (`distributions.repeats`) | sampling turned greedy | drafted tokens are judged against the most probable token instead of a draw |
| sampled answers otherwise, greedy ones being right | wrong distribution | the rule of acceptance or the residual is wrong |
| sampled answers, but only with penalties | penalties | as above |
| only answers of the same seed, where `same_seeds` demands them | seeds | no difference of distributions was seen, but a seed does not give the same tokens |
| only short answers under load or second turns | wrong under load | answers depend on other requests, or on the prefix that a prompt shares with earlier ones |
| only long answers | wrong in long answers | an answer goes wrong beyond a length |
| only prompts that are asked again after their K/V left the devices (`warm`) | wrong after a reload | K/V come back from a host tier with other values, or to other places |
| only answers to long prompts | wrong after long prompts | a prompt is read wrongly beyond a length |
| a rule on fields of the request (`rules`), its greedy or its sampled answers alone | request field | a field of the request is ignored |
| text, usage or streamed answers, the tokens being right | text | text, usage or events differ from the tokens |
| log-probabilities, the tokens being right | log-probabilities | those of other tokens or of another model are reported |

The pattern is evidence, not proof: a fault that shows in only some of its comparisons may be named wrongly.
The report holds no secrets.
"""  # noqa: E501

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash_serve.common.provenance import PACKAGES, now, versions
from dflash_serve.common.reports import number
from dflash_serve.common.settings import Frozen
from dflash_serve.common.terminal import keep_names, table
from dflash_serve.speculation.statistics import AcceptanceStatistics
from dflash_serve.verify.distributions import DistributionComparison
from dflash_serve.verify.questions import (
    BASE,
    BIASED,
    CHOICES,
    CONTINUED,
    EXACT,
    FEWEST,
    GREEDY,
    LOAD,
    LOGPROBS,
    LONG,
    MIN_TOKENS,
    OPTIONAL,
    PENALISED,
    PROMPTS,
    SAMPLED,
    SETTINGS,
    STOP,
    STREAMED,
    TURNS,
    VerifyPlan,
)
from dflash_serve.verify.ranks import NAME as MIXED
from dflash_serve.verify.rules import SEED, RuleCheck
from dflash_serve.verify.subjects import Description
from dflash_serve.verify.tokens import Kind, TokenComparison

Verdict = Literal["lossless", "lossless, but slower", "not lossless", "could not tell"]
SLOWER: Verdict = "lossless, but slower"  # Of `verify --warm`: the same tokens, of which fewer are accepted drafts
EXIT_CODES: dict[Verdict, int] = {"lossless": 0, SLOWER: 1, "not lossless": 1, "could not tell": 3}
COLOURS = {"lossless": "green", SLOWER: "yellow", "not lossless": "red", "could not tell": "yellow"}
METRICS = "behind a router, give the metrics of each worker (--metrics-url, --without-metrics-url)"
RELOADED = "long prompts, asked again"  # The case of `verify --warm` after a reload
SHOWN = 10  # Differences of a case that are printed; the report has all
TOLERATED = 0.01
"""Share of a case's answers whose difference may stay unexplained, by rounding in the plain side's second answer."""
PLAINLY_SAMPLED = {case.name for case in SAMPLED[:BASE]} - PENALISED
SEED_SLIPS = 1  # Seeded answers that rounding may change: about one draw in 10^5 falls on the edge between two tokens


class FaultKind(StrEnum):
    """The kinds of fault of the table above."""

    STALE_STATE = "stale state"
    PENALTIES = "penalties"
    GREEDY_SAMPLING = "sampling turned greedy"
    DISTRIBUTION = "wrong distribution"
    SEEDS = "seeds"
    LOAD = "wrong under load"
    LONG = "wrong in long answers"
    PROMPTS = "wrong after long prompts"
    RELOAD = "wrong after a reload"
    FIELD = "request field"
    TEXT = "text"
    LOGPROBS = "log-probabilities"


EXACT_FAULTS = {
    LOAD.name: FaultKind.LOAD,
    LONG.name: FaultKind.LONG,
    CONTINUED[LONG.name].name: FaultKind.LONG,
    CONTINUED[GREEDY[0].name].name: FaultKind.STALE_STATE,
    STREAMED.name: FaultKind.TEXT,
    LOGPROBS.name: FaultKind.LOGPROBS,
    MIN_TOKENS.name: FaultKind.FIELD,
    STOP.name: FaultKind.FIELD,
    CHOICES.name: FaultKind.FIELD,
    TURNS.name: FaultKind.LOAD,
    PROMPTS.name: FaultKind.PROMPTS,
    RELOADED: FaultKind.RELOAD,
}
RULE_FAULTS = {
    "text": FaultKind.TEXT,
    "usage": FaultKind.TEXT,
    "log-probabilities": FaultKind.LOGPROBS,
}
"""Faults of rules; those of all others are of a field of the request."""
NAMELESS = {case.name for case in CONTINUED.values()}  # Cases in which the names of tokens may be unknown
MAY_BE_SHORT = {*(case.name for case in EXACT), *PENALISED}
"""Cases that near-ties may cut short, which limits what was tested: an engine may refuse them, too."""


class Reload(Frozen):
    """Prompts that were asked again after their K/V left the devices; None = unknown."""

    prompts: int
    prompt_tokens: int
    pool_tokens: int  # Tokens that the K/V cache on the devices holds
    pool_told_by: str
    filler_tokens: int  # Tokens of other prompts that were asked in between
    reloaded_tokens: int | None  # Prompt tokens whose K/V came back from a host tier
    cached_tokens: int | None  # Prompt tokens whose K/V were not computed again, by the answers
    first_length: float | None  # Acceptance length of the first asking
    again_length: float | None

    @property
    def fall(self) -> str:
        """The fall of acceptance, with its cause."""
        before, after = number(self.first_length, 2), number(self.again_length, 2)
        cause = "the drafter's K/V did not come back (sglang#21125, vllm#47890, vllm#57032)"
        return f"acceptance falls from {before} to {after} after a reload: {cause}"

    def __str__(self) -> str:
        lengths = " and ".join(number(one, 2) for one in (self.first_length, self.again_length))
        return (
            f"{self.filler_tokens} filler tokens for a pool of {self.pool_tokens} (told by {self.pool_told_by}), then "
            f"{'unknown' if self.reloaded_tokens is None else self.reloaded_tokens} of {self.prompt_tokens} prompt "
            f"tokens reloaded; acceptance length {lengths}"
        )


class Findings(Frozen):
    """All comparisons and the verdict."""

    verdict: Verdict
    faults: Mapping[FaultKind, str]  # Each with the first comparison that shows it
    reasons: tuple[str, ...]  # Reasons why the verdict is open, or what limits it
    unit: str  # The unit of comparison: token ids, tokens, or characters
    greedy: tuple[TokenComparison, ...]
    sampled: tuple[DistributionComparison, ...]
    seeded: TokenComparison | None
    exact: tuple[TokenComparison, ...] = ()  # Further greedy cases: under load, long, streamed, ...
    rules: tuple[RuleCheck, ...] = ()
    scope: tuple[str, ...] = ()  # What the settings left out, and what the engine does not take, with its reason
    notes: tuple[str, ...] = ()  # Differences that are no fault, because engines do not promise otherwise
    accepted: float | None  # Drafted tokens that were accepted meanwhile; None = unknown
    acceptance_length: float | None
    reload: Reload | None = None  # Of `verify --warm`

    @property
    def headline(self) -> str:
        """The verdict in one line: its faults, or what was tested and what was not."""
        if self.verdict == "not lossless":
            return f"{self.verdict}: {'; '.join(f'{fault} ({place})' for fault, place in self.faults.items())}"
        tested = ": greedy and sampled" if self.sampled else ": greedy"
        untested = f"; not tested: {', '.join(self.scope)}" if self.scope else ""
        return "; ".join([f"{self.verdict}{tested if self.verdict == 'lossless' else ''}{untested}", *self.notes])


class VerifyReport(Frozen):
    """The report of a verification."""

    date: str  # UTC, ISO 8601
    versions: Mapping[str, str]  # Versions of the packages installed here; those of a server elsewhere are unknown
    subjects: Mapping[str, Description]  # The compared systems, `with` and `without` speculation
    plan: VerifyPlan
    noise: float  # Largest gap in nats that counts as a near-tie
    findings: Findings


def report_of(plan: VerifyPlan, subjects: Mapping[str, Description], findings: Findings) -> VerifyReport:
    """The report, with the current date and versions."""
    installed = {"python": platform.python_version(), "platform": sys.platform, **versions(*PACKAGES, "numpy", "scipy")}
    return VerifyReport(
        date=now(), versions=installed, subjects=subjects, plan=plan, noise=plan.noise, findings=findings
    )


def conclude(
    greedy: tuple[TokenComparison, ...],
    sampled: tuple[DistributionComparison, ...],
    seeded: TokenComparison | None,
    acceptance: AcceptanceStatistics,
    *,
    exact: tuple[TokenComparison, ...] = (),
    rules: tuple[RuleCheck, ...] = (),
    unit: str,
    is_plain: bool = True,
    failed: tuple[str, ...] = (),
    scope: tuple[str, ...] = (),
) -> Findings:
    """The verdict with its reasons. A fault decides it even if other comparisons are open.

    Args:
        acceptance: of the speculating side while it answered.
        is_plain: True if the other side is known not to speculate.
        failed: cases that the speculating side alone failed to answer, with its errors.
        scope: what the settings leave out, and what was refused; rules that the plain side breaks are added.
    """
    faults = _faults(greedy, sampled, seeded, exact, rules)
    reasons = (*_unproven(greedy, sampled, seeded, exact), *failed, *_unproven_sides(acceptance, is_plain))
    return Findings(
        verdict="not lossless" if faults else "could not tell" if reasons else "lossless",
        faults=faults,
        reasons=reasons,
        unit=unit,
        greedy=greedy,
        sampled=sampled,
        seeded=seeded,
        exact=exact,
        rules=rules,
        scope=(*scope, *_untested(greedy, exact, rules)),
        notes=tuple(_notes(rules)),
        accepted=acceptance.accepted,
        acceptance_length=acceptance.acceptance_length,
    )


def _cut_short(
    greedy: tuple[TokenComparison, ...], exact: tuple[TokenComparison, ...]
) -> Iterator[tuple[TokenComparison, str]]:
    # cases whose near-ties left less than half of their tokens to compare, with the figures
    behind = {name: one.compared for one in exact for name, case in CONTINUED.items() if one.case == case.name}
    for one in (*greedy, *exact):
        compared = one.compared + behind.get(one.case, 0)
        if one.of_kind("near-tie") and compared < one.tokens / 2 and one.case not in NAMELESS:
            yield one, f"{compared} of {one.tokens} tokens"


def _untested(
    greedy: tuple[TokenComparison, ...], exact: tuple[TokenComparison, ...], rules: tuple[RuleCheck, ...]
) -> Iterator[str]:
    yield from (f"{one.rule} (not kept without speculation)" for one in rules if not one.honoured)
    for case, compared in _cut_short(greedy, exact):
        if case.case in MAY_BE_SHORT:
            yield f"{case.case} beyond {compared}"


def _notes(rules: tuple[RuleCheck, ...]) -> Iterator[str]:
    for one in rules:
        if one.rule == SEED and one.honoured and one.broken:  # most engines promise no seed at every width
            changed = f"{one.broken} of {one.answers} seeded answers changed when repeated with speculation"
            yield f"{changed}, and not without (--same-seeds makes it a fault)"


def _faults(
    greedy: tuple[TokenComparison, ...],
    sampled: tuple[DistributionComparison, ...],
    seeded: TokenComparison | None,
    exact: tuple[TokenComparison, ...],
    rules: tuple[RuleCheck, ...],
) -> dict[FaultKind, str]:
    # the kinds of fault that the failed comparisons fit, by the table above, each with the first comparison that fits
    broken = [one for one in greedy if one.of_kind("fault")]
    if plain := [one for one in broken if one.case not in PENALISED]:
        return {FaultKind.STALE_STATE: _place(plain[0], "fault")}
    broken_rules = [one for one in rules if one.honoured and one.broken and one.rule != SEED]
    # Where logit_bias is kept, a shift among the tokens that it leaves is one of the distribution.
    biased = {BIASED.name} - {BIASED.name for one in broken_rules if one.rule == "logit_bias"}
    places = {one.case: one.where if one.prompt is None else f"prompt {one.prompt}" for one in sampled}
    shifted = {one.case: f"{one.case}, {places[one.case]}" for one in sampled if one.differs}
    plainly = [one for one in sampled if one.differs and one.case in PLAINLY_SAMPLED | biased]
    mixed = next((one.where or "" for one in sampled if one.differs and one.case == MIXED), None)
    found = list[tuple[FaultKind, str]]()
    if plainly:
        kind = FaultKind.GREEDY_SAMPLING if any(map(_turned_greedy, plainly)) else FaultKind.DISTRIBUTION
        found.append((kind, shifted[plainly[0].case]))
    else:
        kinds = {True: FaultKind.PENALTIES, False: FaultKind.FIELD}
        found += [(kinds[case in PENALISED], place) for case, place in shifted.items() if case != MIXED]
        if mixed is not None:
            penalised = any(one.name in mixed for one in SETTINGS if one.params.penalised)
            found.append((FaultKind.PENALTIES if penalised else FaultKind.DISTRIBUTION, shifted[MIXED]))
    found += [(FaultKind.PENALTIES, _place(one, "fault")) for one in broken]
    found += [(EXACT_FAULTS[one.case], _place(one, "fault")) for one in exact if one.of_kind("fault")]
    found += [(RULE_FAULTS.get(one.rule, FaultKind.FIELD), f"{one.rule}: {one.example}") for one in broken_rules]
    if not found and seeded is not None and len(seeded.differences) > SEED_SLIPS:
        found.append((FaultKind.SEEDS, _place(seeded)))
    first = dict[FaultKind, str]()
    for kind, place in found:
        first.setdefault(kind, place)
    return first


def _place(comparison: TokenComparison, *kinds: Kind) -> str:
    # the first difference of these kinds, or of any
    one = next(one for one in comparison.differences if not kinds or one.kind in kinds)
    return f"{comparison.case}, prompt {one.prompt}, position {one.position}"


def _turned_greedy(comparison: DistributionComparison) -> bool:
    # the beginning of an answer determines its next token with speculation, and much less without
    with_, without = comparison.repeats_with, comparison.repeats_without
    return with_ is not None and with_ > 0.8 and with_ > (without or 0.0) + 0.2


def _unproven(
    greedy: tuple[TokenComparison, ...],
    sampled: tuple[DistributionComparison, ...],
    seeded: TokenComparison | None,
    exact: tuple[TokenComparison, ...],
) -> Iterator[str]:
    # reasons why comparisons that did not fail prove less than they should
    for one in (*greedy, *([seeded] if seeded else ())):
        if one.refused and one.case not in PENALISED:
            yield f"{one.case}: refused ({one.refused})"
    for one in (*greedy, *exact):
        if (unstable := one.of_kind("unstable")) > TOLERATED * one.prompts:
            yield f"{one.case}: the plain side does not repeat its own answer to {unstable} prompts"
        # The names of tokens are not known in a continued answer: a gap that may be below the noise counts as one.
        if (unscored := one.of_kind("unscored")) > TOLERATED * one.prompts and one.case not in NAMELESS:
            yield f"{one.case}: {unscored} differences, and the engine does not report how close the tokens were"
    for case, compared in _cut_short(greedy, exact):
        if case.case not in MAY_BE_SHORT:
            yield f"{case.case}: near-ties left {compared} to compare"
    if greedy and not any(one.tokens for one in greedy):
        yield "no greedy answer has any token"
    optional = {case.name for case in OPTIONAL}
    for drawn in sampled:
        if drawn.refused and drawn.case in optional:
            continue
        if drawn.refused:
            yield f"{drawn.case}: refused ({drawn.refused}); `--samples 0` verifies greedy decoding alone"
        elif not drawn.differs and drawn.samples < FEWEST:
            yield f"{drawn.case}: {drawn.samples} samples a side are too few, {FEWEST} are the least"


def _unproven_sides(acceptance: AcceptanceStatistics, is_plain: bool) -> Iterator[str]:
    # reasons why the sides may not be as described
    if acceptance.accepted == 0:
        yield "no drafted token was accepted, so speculation could not change anything"
    elif acceptance.speculates is not True:
        yield f"nothing shows that the side with speculation speculates; {METRICS}"
    if not is_plain:
        yield f"nothing shows that the side without speculation does not speculate; {METRICS}"


def show(report: VerifyReport, console: Console) -> None:
    """Prints the comparisons, and the verdict last."""
    found, whole = report.findings, not console.is_terminal  # a terminal breaks lines between words
    console.print(_tokens(found))
    for comparison in (*found.greedy, *found.exact):
        for difference in comparison.differences[:SHOWN]:
            gap = "gap unknown" if difference.gap is None else f"gap {difference.gap:.2g}"
            sides = f"{difference.with_speculation or 'the end'} with, {difference.without_speculation or 'the end'}"
            place = f"{comparison.case}, prompt {difference.prompt}, position {difference.position}"
            console.print(escape(f"{place}: {sides} without speculation; {gap}: {difference.kind}"), soft_wrap=whole)
        if len(comparison.differences) > SHOWN:
            console.print(f"... and {len(comparison.differences) - SHOWN} more")
    if found.sampled:
        console.print(_distributions(found))
        console.print(
            f"false-alarm rate {report.plan.false_alarm:g} over all cases; deviations: total variation of a"
            f" next-token distribution, seen with probability {report.plan.power:g}",
            soft_wrap=whole,
        )
    for rule in found.rules:
        if rule.honoured and rule.broken and rule.rule != SEED:
            told = f"{rule.rule}: broken {rule.broken} of {rule.answers} times, first in {rule.example}"
            console.print(escape(told), soft_wrap=whole)
    if found.acceptance_length is not None:
        console.print(f"acceptance length meanwhile: τ = {found.acceptance_length:.2f}")
    for reason in found.reasons:
        console.print(f"[yellow]?[/yellow] {escape(reason)}", soft_wrap=whole)
    console.print(f"[bold {COLOURS[found.verdict]}]{escape(found.headline)}[/]", soft_wrap=whole)


def _tokens(found: Findings) -> Table:
    made = table("token for token", "prompts", "same", f"{found.unit}\ncompared", "near-\nties", "faults")
    for one in (*found.greedy, *found.exact, *((found.seeded,) if found.seeded else ())):
        if one.refused:
            made.add_row(one.case, "refused")
            continue
        compared, wrong = f"{one.compared} of {one.tokens}", one.of_kind("fault", "unstable", "unscored")
        figures = (one.prompts, one.identical, compared, one.of_kind("near-tie"), wrong)
        made.add_row(one.case, *map(str, figures))
    return keep_names(made)


def _distributions(found: Findings) -> Table:
    made = table("sampled", "samples a side", "p-value", "distribution", "smallest visible deviation")
    for one in found.sampled:
        if one.p_value is None:
            made.add_row(one.case, "0", "", "refused")
            continue
        visible = "none" if one.smallest_deviation is None else f"{one.smallest_deviation:.3f}"
        visible = "" if one.prompt is None else visible
        outcome = ("[red]differs[/red]", "") if one.differs else ("no difference seen", visible)
        made.add_row(one.case, str(one.samples), f"{one.p_value:.2g}", *outcome)
    return keep_names(made)
