"""The signed report of a verification, and how a reader at a terminal sees it. It holds no secrets."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash_serve.common.files import write_whole
from dflash_serve.common.frozen import Frozen
from dflash_serve.common.provenance import now, versions
from dflash_serve.errors import UserError
from dflash_serve.verify.distributions import DistributionComparison
from dflash_serve.verify.findings import Findings
from dflash_serve.verify.questions import LOOKS, NOISE, VerifyPlan
from dflash_serve.verify.subjects import Description
from dflash_serve.verify.tokens import TokenComparison

PACKAGES = ("dflash-serve", "torch", "transformers", "sglang", "tensorrt-llm", "vllm", "numpy", "scipy")
COLOURS = {"lossless": "green", "not lossless": "red", "could not tell": "yellow"}
SHOWN = 10
"""Differences of a case that are printed; the report has all."""


class VerifyReport(Frozen):
    """A verification as it is kept."""

    date: str
    """UTC, ISO 8601."""
    versions: Mapping[str, str]
    """Of what is installed here; a server elsewhere does not tell."""
    subjects: Mapping[str, Description]
    """What was compared, `with` and `without` speculation."""
    plan: VerifyPlan
    noise: float
    """Largest gap in nats that counts as a near-tie."""
    looks: tuple[float, ...] = LOOKS
    findings: Findings
    sha256: str = ""
    """Of the report's canonical JSON (sorted keys, no spaces) without this field."""

    def signed(self) -> VerifyReport:
        """The same with its digest."""
        return self.model_copy(update={"sha256": self._digest()})

    def is_intact(self) -> bool:
        """Whether nothing in it was changed since it was signed."""
        return self.sha256 == self._digest()

    def _digest(self) -> str:
        content = self.model_dump(mode="json", exclude={"sha256"})
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def report_of(plan: VerifyPlan, subjects: Mapping[str, Description], findings: Findings) -> VerifyReport:
    """A signed report of now and here."""
    installed = {"python": platform.python_version(), "platform": sys.platform, **versions(*PACKAGES)}
    noise = NOISE[plan.dtype]
    return VerifyReport(
        date=now(), versions=installed, subjects=subjects, plan=plan, noise=noise, findings=findings
    ).signed()


def write_report(report: VerifyReport, path: Path) -> None:
    """Writes JSON.

    Raises:
        UserError: the folder cannot be written.
    """
    write_whole(path, report.model_dump_json(indent=1) + "\n", do="name another --output")


def read_report(path: Path) -> VerifyReport:
    """A report that is as it was signed.

    Raises:
        UserError: it cannot be read, or was changed.
    """
    try:
        report = VerifyReport.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError, UnicodeDecodeError):
        raise UserError("cannot be read as a report of verify", where=str(path)) from None
    if not report.is_intact():
        raise UserError("was changed after it was signed (sha256 differs)", where=str(path), do="verify again")
    return report


def show(report: VerifyReport, console: Console) -> None:
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
