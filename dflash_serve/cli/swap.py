"""`dflash-serve swap`: another drafter for a running server, without a restart. Exit codes: 0 serves, 1 taken back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_serve.answers.prompts import read_prompt_set
from dflash_serve.cli import options
from dflash_serve.common.extras import need
from dflash_serve.common.http import read_api_key
from dflash_serve.errors import UserError

if TYPE_CHECKING:
    from dflash_serve.adapting.swap import SwapReport

NEW = "Folder of the new drafter, as the server sees it."
BACK = "Take the drafter before the served one again, without a proof."
LOSS = "Loss of tokens per step with which the new drafter is kept, a share."


def swap(
    context: typer.Context,
    url: Annotated[str, typer.Option(help="Address of a running embedded server, not of a router.")],
    drafter: Annotated[str | None, typer.Argument(metavar="DRAFTER", help=NEW)] = None,
    back: Annotated[bool, typer.Option("--back", help=BACK)] = False,
    allowed_loss: Annotated[float, typer.Option(help=LOSS, min=0, max=1)] = 0.1,
    prompts: options.PromptFile = None,
    num_prompts: Annotated[int, typer.Option(help=options.NUM_PROMPTS, min=1)] = 8,
    max_tokens: options.MaxTokens = 64,
    model: options.ServedModel = None,
    api_key_file: options.ApiKeyFile = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Replace the drafter of a running server, prove that it helps and changes no answer, or take it back."""
    need("prove", "httpx", "numpy", "prometheus_client", "scipy")
    from dflash_serve.adapting.swap import SwappableServer, SwapSettings
    from dflash_serve.adapting.swap import swap as run
    from dflash_serve.client.endpoint import Endpoint

    if (drafter is None) != back:
        raise UserError("one of the two is needed", where="DRAFTER or --back", do="name a drafter, or take one back")
    endpoint = Endpoint(url, model=model, api_key=read_api_key(api_key_file), concurrency=4)
    if drafter is None:
        measured = ("allowed_loss", "prompts", "num_prompts", "max_tokens", "model")
        options.refuse_ignored(context, measured, "with --back nothing is measured")
        done = SwappableServer(endpoint).update(None)
        typer.echo(json.dumps(done) if as_json else f"serves: {done['drafter']} (revision {done['revision']})")
        return
    asked = read_prompt_set(prompts)[:num_prompts]
    settings = SwapSettings(max_tokens=max_tokens, allowed_loss=allowed_loss)

    def told(what: str) -> None:
        if not (quiet or as_json):
            typer.echo(what, err=True)

    report = run(SwappableServer(endpoint), drafter, asked, settings, told)
    typer.echo(report.model_dump_json(indent=2) if as_json else _line(report))
    if not report.kept:
        raise typer.Exit(1)


def _line(report: SwapReport) -> str:
    after = "unknown" if report.after is None else f"{report.after:.2f}"
    figures = f"tokens per step {report.before:.2f} to {after} on {report.prompts} prompts"
    if not report.kept:
        return f"taken back: {report.reason}; {figures}; revision {report.revision} serves"
    flight = f"{report.undrafted} answers in flight went on without drafts"
    took = f"loaded in {report.load_seconds:.1f} s, no step ran for {report.pause_seconds:.3f} s"
    return f"swapped: {report.reason}; {figures}; {flight}; {took}; revision {report.revision} serves {report.drafter}"
