"""`dflash-serve doctor`: explains low acceptance. Exit codes: 0 healthy, 1 a fault was found, 3 undecided."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from dflash_serve.adapter.registry import embedded_backend
from dflash_serve.answers.prompts import read_prompt_set, template_kwargs
from dflash_serve.cli import options
from dflash_serve.cli.options import described_pair
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.common.extras import need
from dflash_serve.common.http import read_api_key
from dflash_serve.common.progress import shown
from dflash_serve.common.reports import number, survival_text
from dflash_serve.common.terminal import keep_names, table
from dflash_serve.doctor.diagnosis import Verdict
from dflash_serve.errors import UserError

if TYPE_CHECKING:
    from dflash_serve.doctor.diagnosis import SuspectReport
    from dflash_serve.doctor.examination import PairReport

URL = "Address of a running server of this pair. It must have no other clients meanwhile."
Url = Annotated[str | None, typer.Option(help=URL)]
SEEN = "Acceptance length of a server that cannot be asked."
Observed = Annotated[float | None, typer.Option(help=SEEN, min=1)]
LENGTHS = "Report of evaluate --by length: a fall of acceptance with the context is explained, too."
Survival = Annotated[Path | None, typer.Option(help=LENGTHS)]
NumPrompts = Annotated[int, typer.Option(help=options.NUM_PROMPTS, min=2)]
MaxTokens = Annotated[int, typer.Option(help=options.MAX_TOKENS, min=8)]
SHOWN = 8  # Explanations that are printed; the JSON has all


def doctor(
    context: typer.Context,
    deployment: options.DeploymentFile = None,
    target: options.Target = None,
    drafter: options.Drafter = None,
    url: Url = None,
    metrics_url: options.MetricsUrl = None,
    observed: Observed = None,
    survival: Survival = None,
    model: options.ServedModel = None,
    api_key_file: options.ApiKeyFile = None,
    block_size: options.BlockSize = None,
    dtype: options.Dtype = None,
    prompts: options.PromptFile = None,
    chat_template_kwargs: options.TemplateKwargs = None,
    num_prompts: NumPrompts = 16,
    max_tokens: MaxTokens = 64,
    output: options.Report = Path("doctor-report.json"),
    resume: options.Resume = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Explain low acceptance: of a server, or of a pair whose checkpoint may have a wrong setting."""
    need("prove", "httpx", "numpy", "prometheus_client", "scipy")
    if url is not None and observed is not None:
        raise UserError("the server reports it", where="--observed", do="leave it out, or --url")
    if not options.names_target(deployment, target) and (url is not None or observed is not None):
        do = "give a deployment.yaml, or --target and --drafter"
        raise UserError("it is not said which pair the server has", where="doctor", do=do)
    if url is None:
        options.refuse_ignored(
            context, ("metrics_url", "model", "api_key_file"), "no server is asked", "give --url, too"
        )
    asked = read_prompt_set(prompts, variables=template_kwargs(chat_template_kwargs))[:num_prompts]
    flags = options.deployment_flags({**context.params, "api_key_file": None})  # that file is the key of the server
    described = described_pair(deployment, flags, embedded_backend(), quiet=quiet)
    urls = tuple(metrics_url or ())
    endpoint = Endpoint(url, model, read_api_key(api_key_file), metrics_urls=urls) if url else None
    from dflash_serve.doctor.examiner import examine

    with shown(quiet=quiet):
        report = examine(
            described,
            asked,
            output,
            endpoint=endpoint,
            observed=observed,
            lengths=survival,
            max_tokens=max_tokens,
            resume=resume,
        )
    if as_json:
        typer.echo(output.read_text(encoding="utf-8"), nl=False)
    else:
        _show(report, None if quiet else output)
    raise typer.Exit(report.verdict.exit_code)


def _show(report: SuspectReport | PairReport, output: Path | None) -> None:
    from dflash_serve.doctor.diagnosis import SuspectReport

    console = Console(highlight=False, markup=False, emoji=False)
    colour = {Verdict.HEALTHY: "green", Verdict.FAULT: "red", Verdict.UNCLEAR: "yellow"}[report.verdict]
    console.print(f"\n{report.verdict}", style=f"bold {colour}")
    for sentence in report.sentences:
        console.print(f"  {sentence}")
    if isinstance(report, SuspectReport):
        console.print(_table(report))
        if report.cannot_be_told_from_healthy and report.verdict == Verdict.HEALTHY:
            console.print(f"cannot be told from healthy by this: {', '.join(report.cannot_be_told_from_healthy)}")
    for note in report.notes:
        console.print(f"note: {note}")
    if output is not None:
        console.print(f"report: {output}", soft_wrap=True)


def _table(report: SuspectReport) -> Table:
    made = table("explanation", "τ", "survival by slot", "probability", "how it comes about")
    observed = report.observed
    made.add_row("(observed)", number(observed.acceptance_length, 3), survival_text(observed.survival), "", "")
    for row in report.explanations[:SHOWN]:
        length, survival = number(row.predicted.acceptance_length, 3), survival_text(row.predicted.survival)
        made.add_row(row.name, length, survival, f"{row.posterior:.2g}", row.says)
    return keep_names(made)
