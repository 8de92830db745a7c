"""The report for a reader at a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash_serve.proving.lossless.findings import DistributionComparison, Findings, TokenComparison
from dflash_serve.proving.lossless.report import Report

COLOURS = {"lossless": "green", "not lossless": "red", "could not tell": "yellow"}
SHOWN = 10
"""Differences of a case that are printed; the report has all."""


def show(report: Report, console: Console) -> None:
    """Prints what was compared, and the verdict last."""
    found = report.findings
    console.print(_tokens(found, report.plan.prompts))
    for comparison in found.greedy:
        for line in _differences(comparison):
            console.print(line, soft_wrap=True)
    if found.sampled:
        console.print(_distributions(found))
        console.print(
            f"false-alarm rate {report.plan.false_alarm:g} over all cases and looks; deviations: total variation of a"
            f" next-token distribution, seen with probability {report.plan.power:g}",
            soft_wrap=True,
        )
    for line in _verdict(found):
        console.print(line, soft_wrap=True)


def _tokens(found: Findings, prompts: int) -> Table:
    table = Table("token for token", "prompts", "identical", f"{found.unit} compared", "near-ties", "faults")
    for one in (*found.greedy, *((found.seeded,) if found.seeded else ())):
        if one.refused:
            table.add_row(one.case, "refused", "", "", "", "")
            continue
        other = one.of_kind("fault", "unstable", "unscored")
        compared = f"{one.compared} of {one.tokens}"
        table.add_row(
            one.case, str(one.prompts), str(one.identical), compared, str(one.of_kind("near-tie")), str(other)
        )
    return table


def _differences(one: TokenComparison) -> Iterator[str]:
    for difference in one.differences[:SHOWN]:
        gap = "gap unknown" if difference.gap is None else f"gap {difference.gap:.2g}"
        yield escape(
            f"{one.case}, prompt {difference.prompt}, position {difference.position}: "
            f"{difference.with_speculation or 'the end'} with, {difference.without_speculation or 'the end'} without "
            f"speculation; {gap}: {difference.kind}"
        )
    if len(one.differences) > SHOWN:
        yield f"... and {len(one.differences) - SHOWN} more"


def _distributions(found: Findings) -> Table:
    table = Table("sampled", "samples a side", "least p-value", "distribution", "smallest visible deviation")
    for one in found.sampled:
        if one.refused:
            table.add_row(one.case, "0", "", "refused", "")
            continue
        least = min(look.p_value for look in one.looks)
        differs = "[red]differs[/red]" if one.differs else "no difference seen"
        table.add_row(one.case, str(one.samples), f"{least:.2g}", differs, _deviation(one))
    return table


def _deviation(one: DistributionComparison) -> str:
    if one.differs:
        return ""
    return "none" if one.smallest_deviation is None else f"{one.smallest_deviation:.3f}"


def _verdict(found: Findings) -> Iterator[str]:
    if found.acceptance_length is not None:
        yield f"acceptance length on the way: τ = {found.acceptance_length:.2f}"
    elif found.accepted is None:
        yield "the engine does not say how many drafted tokens it accepted"
    for reason in found.reasons:
        yield f"[yellow]?[/yellow] {escape(reason)}"
    kinds = ": " + ", ".join(found.faults) if found.faults else ""
    yield f"[bold {COLOURS[found.verdict]}]{found.verdict}{kinds}[/]"
