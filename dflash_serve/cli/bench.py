"""`dflash-serve bench`: is speculation faster at your load? A sweep by aiperf, interleaved, and its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from dflash_serve.adapter.registry import EMBEDDED
from dflash_serve.cli import options
from dflash_serve.common.extras import need
from dflash_serve.common.progress import shown
from dflash_serve.common.reports import number
from dflash_serve.errors import UserError

if TYPE_CHECKING:
    from dflash_serve.bench.results import Run
    from dflash_serve.bench.runner import Bench

VARIANTS = "off, fixed (the whole block), auto, numbers"
Variants = Annotated[str, Option(help=f"Widths to serve with: {VARIANTS}.")]
Variant = Annotated[list[str] | None, Option(help="Overlay of the deployment, NAME=FILE.yaml; once for each.")]
Endpoint = Annotated[list[str] | None, Option("--url", help="Running server, NAME=http://host:port; once for each.")]
METRICS = "Metrics of a worker behind a --url's router, NAME=http://host:port; once for each."
MetricsUrl = Annotated[list[str] | None, Option(help=METRICS)]
DATASETS = "FILE.jsonl of {'prompt': ...}, humaneval, hf:ORG/NAME, speed_bench_coding=FILE, spec_al_..."
DatasetName = Annotated[str, Option(help=f"Prompts: {DATASETS}")]
Concurrency = Annotated[str, Option(help="Requests in flight to a server, a run for each number.")]
Rounds = Annotated[int, Option(help="Runs of each variant and concurrency; medians are reported.", min=1)]
RequestsPerUser = Annotated[int, Option(help="Requests of a run, for each one in flight.", min=1)]
MinRequests = Annotated[int, Option(help="Fewest requests of a run.", min=1)]
MaxTokens = Annotated[int, Option(help=options.MAX_TOKENS, min=2)]
IgnoreEos = Annotated[bool, Option(help="Make every answer --max-tokens long.")]
AT = "Compare the variants at so many tokens/s/user, too."
Interactivity = Annotated[float | None, Option(help=AT, min=0)]
Baseline = Annotated[str | None, Option(help="Variant to compare with. [default: off, or the first]")]
Tokenizer = Annotated[str | None, Option(help="Tokenizer: hub id or folder. [default: the target's]")]
Hardware = Annotated[str | None, Option(help="Hardware of the running servers, for the report.")]
Devices = Annotated[int | None, Option(help="Devices that throughput is divided by. [default: hardware.count]", min=1)]
InTurn = Annotated[bool | None, Option(help="Run one server at a time. [default: not with the embedded backend]")]
WarmUp = Annotated[bool, Option(help="Ask each server as many requests as are in flight, before it is measured.")]
NAME_TARGET = "give a deployment.yaml or --target, or leave it out"
Output = Annotated[Path, Option(help="Folder for runs and report; finished runs in it are kept.")]


def bench(
    context: typer.Context,
    deployment: options.DeploymentFile = None,
    target: options.Target = None,
    drafter: options.Drafter = None,
    backend: options.Backend = EMBEDDED,
    variants: Variants = "off,fixed,auto",
    variant: Variant = None,
    endpoint: Endpoint = None,
    metrics_url: MetricsUrl = None,
    dataset: DatasetName = "humaneval",
    concurrency: Concurrency = "1,2,4,8,16,32",
    rounds: Rounds = 3,
    requests_per_user: RequestsPerUser = 4,
    min_requests: MinRequests = 8,
    max_tokens: MaxTokens = 128,
    ignore_eos: IgnoreEos = False,
    temperature: options.Temperature = 0.0,
    chat_template_kwargs: options.TemplateKwargs = None,
    interactivity: Interactivity = None,
    baseline: Baseline = None,
    api_key_file: options.ApiKeyFile = None,
    tokenizer: Tokenizer = None,
    hardware: Hardware = None,
    devices: Devices = None,
    in_turn: InTurn = None,
    warm_up: WarmUp = True,
    output: Output = Path("bench"),
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure throughput and interactivity with and without speculation, side by side.

    It can be interrupted: finished runs are kept, and the same command continues.
    """
    need("bench", "httpx", "jinja2", "prometheus_client")
    from dflash_serve.bench.runner import Bench
    from dflash_serve.bench.settings import BenchSettings

    own = options.engine_arguments(context, backend)
    if deployment is None and target is None:
        options.refuse_ignored(context, ("variants", "variant", "drafter"), "no server is started", NAME_TARGET)
        if own:
            raise UserError("no server is started that takes arguments", where="--", do=NAME_TARGET)
    if not endpoint:
        options.refuse_ignored(context, ("metrics_url",), "no running server is asked", "give --url, too")
        options.refuse_ignored(context, ("api_key_file",), "servers that are started need no key")
    _run(Bench(options.settings_of(BenchSettings, context.params, **own)), as_json=as_json, quiet=quiet or as_json)


def _run(asked: Bench, *, as_json: bool, quiet: bool) -> None:
    output = asked.settings.output
    if asked.told is not None and not quiet:
        typer.echo(f"dflash-serve: {asked.told}", err=True)
    try:
        with shown(quiet=quiet):
            files = asked.run(_keep_quiet if quiet else _tell)
    except KeyboardInterrupt:
        typer.echo(f"interrupted: finished runs are in {output}; the same command goes on with the rest", err=True)
        raise typer.Exit(130) from None
    except UserError as error:
        if asked.finished():
            typer.echo(f"finished runs are in {output}; the same command goes on with the rest", err=True)
        raise error
    report = files[0].read_text(encoding="utf-8")
    if as_json:
        typer.echo(report, nl=False)
        return
    typer.echo(json.loads(report)["sentence"])
    if not quiet:
        typer.echo(f"report: {files[-1]}")


def _keep_quiet(_run: Run, _done: int, _planned: int) -> None: ...


def _tell(run: Run, done: int, planned: int) -> None:
    length, rate = run.acceptance.acceptance_length, run.interactivity
    figures = [f"{run.throughput:.1f} tokens/s", "? tokens/s/user" if rate is None else f"{rate:.1f} tokens/s/user"]
    figures += [] if length is None else [f"τ {length:.2f}"]
    by_worker = [f"{worker} {number(one.acceptance_length, 2)}" for worker, one in run.workers.items()]
    figures += [f"τ by worker: {', '.join(by_worker)}"] if by_worker else []
    figures += [f"{run.errors} failed"] if run.errors else []
    figures += [f"{run.cut} streams ended early, without a reason"] if run.cut else []
    typer.echo(f"[{done}/{planned}] {run}: {', '.join(figures)}")
