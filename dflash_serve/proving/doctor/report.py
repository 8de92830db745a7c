"""The doctor's report: JSON for machines, a page for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash_serve.proving.doctor.corrections import Correction
from dflash_serve.proving.doctor.counts import Counts, length_error, total
from dflash_serve.proving.doctor.diagnosis import HEALTHY, Diagnosis, Explanation

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = 8
"""Explanations on the page; the JSON has all."""


def figures(each: Sequence[Counts]) -> dict[str, Any]:
    """τ with its standard error over prompts, and survival."""
    whole = total(each)
    return {
        "prompts": len(each),
        "steps": whole.steps,
        "acceptance_length": whole.length,
        "error": length_error(each),
        "survival": whole.survival,
    }


def suspect_report(diagnosis: Diagnosis) -> dict[str, Any]:
    """What was concluded of a server."""
    return {
        "explanations": [_explanation(each) for each in diagnosis.explanations],
        "named": list(diagnosis.named),
        "cannot_be_told_from_healthy": list(diagnosis.alike),
    }


def pair_report(found: Sequence[Correction]) -> list[dict[str, Any]]:
    """What would raise acceptance."""
    return [
        {
            "cause": correction.alternative.cause,
            "setting": correction.alternative.setting,
            "before": correction.before,
            "after": correction.after,
            "gain_95": list(correction.interval),
            "p_value": correction.p_value,
        }
        for correction in found
    ]


def _explanation(each: Explanation) -> dict[str, Any]:
    return {
        "cause": each.hypothesis.cause,
        "name": each.hypothesis.name,
        "says": each.hypothesis.says,
        "predicted": figures(each.hypothesis.predicted),
        "posterior": each.posterior,
        "p_value": each.p_value,
    }


def show(report: Mapping[str, Any], console: Console) -> None:
    """The page."""
    colour = {"healthy": "green", "fault": "red"}.get(report["verdict"], "yellow")
    console.print(f"\n[bold {colour}]{report['verdict']}[/]")
    for sentence in report["sentences"]:
        console.print(f"  {sentence}")
    if "explanations" in report:
        console.print(_table(report))
    alike = report.get("cannot_be_told_from_healthy")
    if alike and report["verdict"] == HEALTHY:
        console.print(f"cannot be told from healthy by this: {', '.join(alike)}")
    for note in report["notes"]:
        console.print(f"note: {note}")


def _table(report: Mapping[str, Any]) -> Any:
    from rich.table import Table

    table = Table("explanation", "τ", "survival by slot", "probability", "how it comes about")
    observed = report["observed"]
    table.add_row("(observed)", f"{observed['acceptance_length']:.3f}", _survival(observed["survival"]), "", "")
    for row in report["explanations"][:SHOWN]:
        predicted = row["predicted"]
        length = f"{predicted['acceptance_length']:.3f}"
        table.add_row(row["name"], length, _survival(predicted["survival"]), f"{row['posterior']:.2g}", row["says"])
    return table


def _survival(values: Sequence[float] | None) -> str:
    return "unknown" if values is None else " ".join(f"{value:.2f}" for value in values)
