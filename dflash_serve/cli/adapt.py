"""`dflash-serve adapt`: a drafter fitted to logged traffic, and a verdict if it should be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dflash_serve.adapter.registry import embedded_backend
from dflash_serve.cli import options
from dflash_serve.cli.options import described_pair
from dflash_serve.common.extras import need
from dflash_serve.common.reports import number
from dflash_serve.common.terminal import keep_names, table

if TYPE_CHECKING:
    from dflash_serve.adapting.run import AdaptReport, Prepared

LOGS = "JSONL file or folder of prompts, messages, or logged requests of an OpenAI-compatible server; once for each."
GENERAL = "Prompts of other kinds, JSONL, on which it must not lose much. [default: the bundled prompts]"


def adapt(
    context: typer.Context,
    traffic: Annotated[list[Path], typer.Option(help=LOGS)],
    output: Annotated[Path, typer.Option(help="Folder for prompts, answers, the drafter and the report.")],
    deployment: options.DeploymentFile = None,
    target: options.Target = None,
    drafter: options.Drafter = None,
    general: Annotated[Path | None, typer.Option(help=GENERAL)] = None,
    minutes: Annotated[float, typer.Option(help="Time to train, without answers and measuring.", min=0.01)] = 60.0,
    steps: Annotated[int | None, typer.Option(help="Steps to train, instead of --minutes.", min=1)] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate. [default: as in `train`]", min=1e-8, max=1)] = None,
    max_tokens: Annotated[int, typer.Option(help=options.MAX_TOKENS, min=8)] = 256,
    held_out: Annotated[float, typer.Option(help="Share of conversations held out.", min=0.01, max=0.9)] = 0.2,
    allowed_loss: Annotated[float, typer.Option(help="Loss of τ on general prompts, a share.", min=0, max=1)] = 0.05,
    device: Annotated[str, typer.Option(help="Where to train: auto, cpu, cuda or cuda:N.")] = "auto",
    resume: options.Resume = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what it would train on, and do nothing.")] = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Fit the served drafter to your own traffic, and measure if the new one should be served."""
    need("train", "safetensors", "torch", "transformers")
    need("prove", "scipy")
    from dflash_serve.adapting import run
    from dflash_serve.adapting.gate import EXIT_CODES
    from dflash_serve.training.recipe import TrainingSection

    given = {"target": target, "drafter": drafter}
    described = described_pair(deployment, options.deployment_flags(given), embedded_backend(), quiet=quiet)
    if steps is not None:
        options.refuse_ignored(context, ("minutes",), "--steps says how long to train")
    budget = {"minutes": minutes} if steps is None else {"steps": steps}
    training = TrainingSection.model_validate({**budget, **({"lr": lr} if lr is not None else {})})
    settings = run.AdaptSettings(
        training=training, max_tokens=max_tokens, held_out=held_out, allowed_loss=allowed_loss, general=general
    )
    prepared = run.prepare(described, traffic, output, settings)
    if dry_run:
        _tell(prepared, as_json=as_json)
        return
    if not run.adapt(prepared, output, settings, resume=resume, device=device, quiet=quiet):
        raise typer.Exit(130)  # as after any other interruption
    report = run.read_report(output)
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        _print(report, output, quiet=quiet)
    raise typer.Exit(EXIT_CODES[report.verdict])


def _tell(prepared: Prepared, *, as_json: bool) -> None:
    sides = {name.removesuffix(".jsonl"): len(requests) for name, requests in prepared.sides.items()}
    left_out, recipe = dict(prepared.traffic.left_out), prepared.recipe.model_dump(mode="json")
    if as_json:
        plan = {"traffic": prepared.traffic.files, "sides": sides, "left_out": left_out, "recipe": recipe}
        typer.echo(json.dumps(plan, indent=2))
        return
    typer.echo(f"requests: {sides['training']} to train on, {sides['held-out']} held out")
    for reason, count in sorted(left_out.items()):
        typer.echo(f"left out: {count} ({reason})")
    typer.echo(f"general prompts: {len(prepared.general)}")
    typer.echo(f"begins with: {prepared.served}")
    steps, minutes = prepared.recipe.training.steps, prepared.recipe.training.minutes
    budget = f"{steps} steps" if minutes is None else f"{minutes:g} minutes"
    typer.echo(f"training: {budget}, then both drafters answer the held-out and the general prompts")


def _print(report: AdaptReport, output: Path, *, quiet: bool) -> None:
    console = Console(markup=False, emoji=False)
    if not quiet:
        made = table("set", "group", "prompts", "τ before", "τ after", "95 % of the gain")
        for name, found in (("traffic", report.on_traffic), ("general", report.on_general)):
            for dimension, groups in found.items():
                for group, one in groups.items():
                    gain = "unknown" if one.gain_95 is None else "{:+.3f} to {:+.3f}".format(*one.gain_95)
                    label = group if group == dimension else f"{dimension} {group}"
                    made.add_row(name, label, str(one.prompts), number(one.before, 3), number(one.after, 3), gain)
        console.print(keep_names(made))
        for reason, count in sorted(report.left_out.items()):
            console.print(f"left out: {count} requests ({reason})", soft_wrap=True)
        console.print(f"drafter: {report.drafter}; report: {output / 'report.json'}", soft_wrap=True)
    console.print(f"{report.verdict}: {report.reason}", soft_wrap=True)
