"""`dflash-serve verify`: tests that speculation is lossless. Exit codes: 0 lossless, 1 not lossless, 3 undecided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dflash_serve.adapter.registry import EMBEDDED, backend, server_backend
from dflash_serve.answers.engine import Prompt
from dflash_serve.answers.prompts import read_prompt_set
from dflash_serve.cli import options
from dflash_serve.cli.options import described_pair
from dflash_serve.common.extras import need
from dflash_serve.common.progress import doing, shown
from dflash_serve.common.reports import write_json
from dflash_serve.common.store import resumable
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError
from dflash_serve.verify.settings import EMBEDDED_SAMPLES, SERVER_SAMPLES, VerifySettings
from dflash_serve.verify.subjects import SubjectPair, engine_in_process, server_started_twice

OF_OURS = ("deployment", "target", "drafter", "backend_name", "block_size", "width")
"""Options of a deployment, which running servers cannot follow."""
BUNDLED_LIMITS = {"max_batch_size": 16, "max_model_len": 1024}

WithUrl = Annotated[str | None, typer.Option("--url", help="Address of a running server that speculates.")]
WithoutUrl = Annotated[
    str | None,
    typer.Option(
        "--without-url",
        help="Address of the same server without speculation. [default: --url's, whose requests switch it off]",
    ),
]
WithMetrics = Annotated[
    list[str] | None, typer.Option("--metrics-url", help=options.METRICS_URL.format("--url's engine"))
]
WithoutMetrics = Annotated[list[str] | None, typer.Option(help=options.METRICS_URL.format("--without-url's engine"))]
Concurrency = Annotated[int, typer.Option(help="Requests in flight to a server.", min=1)]
NumPrompts = Annotated[int | None, typer.Option(help=f"{options.NUM_PROMPTS} [default: all]", min=1)]
Samples = Annotated[
    int | None,
    typer.Option(
        help="How many answers to sample on a side for a case; 0 verifies greedy decoding alone."
        f" [default: {SERVER_SAMPLES}; embedded: {EMBEDDED_SAMPLES}]",
        min=0,
    ),
]
FalseAlarm = Annotated[
    float,
    typer.Option(help="Probability of calling a sound engine faulty, over all sampled cases.", min=1e-6, max=0.5),
]
LongTokens = Annotated[
    int, typer.Option(help="Length of the long answers, cut to the target's context; 0 leaves them out.", min=0)
]
Penalties = Annotated[bool, typer.Option(help="Verify requests with penalties, too.")]
SameSeeds = Annotated[
    bool | None,
    typer.Option(help="Demand the same sampled tokens for the same seed. [default: embedded in float32]"),
]
WARM = "Ask long prompts twice, with so many others between that their K/V leave the devices; nothing else is asked."
Warm = Annotated[bool, typer.Option("--warm", help=WARM)]
POOL = "Tokens that the K/V cache of --url's devices holds. [default: by its metrics]"
PoolTokens = Annotated[int | None, typer.Option(help=POOL, min=1)]
NOT_WARM = ("long_tokens", "samples", "false_alarm", "penalties", "same_seeds", "resume")
"""Options that have no effect with `--warm`."""


def verify(
    context: typer.Context,
    deployment: options.DeploymentFile = None,
    with_url: WithUrl = None,
    without_url: WithoutUrl = None,
    with_metrics_url: WithMetrics = None,
    without_metrics_url: WithoutMetrics = None,
    target: options.Target = None,
    drafter: options.Drafter = None,
    backend_name: options.Backend = EMBEDDED,
    block_size: options.BlockSize = None,
    width: options.Width = None,
    dtype: options.Dtype = None,
    model: options.ServedModel = None,
    api_key_file: options.ApiKeyFile = None,
    concurrency: Concurrency = 16,
    prompts: options.PromptFile = None,
    raw: options.Raw = False,
    chat_template_kwargs: options.TemplateKwargs = None,
    num_prompts: NumPrompts = None,
    max_tokens: options.MaxTokens = 128,
    long_tokens: LongTokens = 2048,
    samples: Samples = None,
    false_alarm: FalseAlarm = 1e-3,
    penalties: Penalties = True,
    same_seeds: SameSeeds = None,
    warm: Warm = False,
    pool_tokens: PoolTokens = None,
    output: options.Report = Path("verify-report.json"),
    resume: options.Resume = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Test that speculation changes no answer, on any engine; or show the changes."""
    need("prove", "httpx", "numpy", "prometheus_client", "scipy")
    settings = options.settings_of(VerifySettings, context.params)
    asked = read_prompt_set(prompts, raw=raw, variables=settings.chat_template_kwargs)
    _check_warm(context, settings)
    if with_url or without_url:
        options.refuse_ignored(
            context, OF_OURS, "running servers have their own", "leave it out, or --url and --without-url"
        )
        if without_url is None:
            options.refuse_ignored(context, ("without_metrics_url",), "one server is asked", "give --without-url, too")
        if options.engine_arguments(context, backend_name):
            raise UserError("running servers have their own arguments", where="--", do="leave them out")
        pair = settings.servers()
    else:
        named = ("with_metrics_url", "without_metrics_url", "model", "api_key_file")
        options.refuse_ignored(context, named, "only running servers have it", "give --url, too")
        served = {**context.params, "api_key_file": None}  # the option's file is the key of a running server
        flags = {**options.deployment_flags(served), **options.engine_arguments(context, backend_name)}
        described = _speculating(deployment, flags, backend_name)
        if backend_name == EMBEDDED:
            options.refuse_ignored(context, ("concurrency",), "the embedded engine runs here, and no server is asked")
            pair = engine_in_process(described)
        else:
            pair = server_started_twice(server_backend(backend_name), described, concurrency=concurrency)
    raise typer.Exit(_run(settings, asked, pair, as_json=as_json, quiet=quiet))


def _check_warm(context: typer.Context, settings: VerifySettings) -> None:
    if not settings.warm:
        options.refuse_ignored(context, ("pool_tokens",), "no pool is filled", "give --warm, too")
        return
    options.refuse_ignored(context, NOT_WARM, "prompts are asked greedily, twice")
    if settings.with_url is None:
        raise UserError("only a running server keeps K/V in host memory", where="--warm", do="give --url, too")


def _speculating(path: Path | None, flags: Mapping[str, Any], backend_name: str) -> Deployment:
    found = described_pair(path, flags, backend(backend_name), limits=BUNDLED_LIMITS)
    if found.drafter is None or found.speculation.width in ("off", 1):
        raise UserError("it does not speculate", where=str(path or "verify"), do="name a drafter, and no width of off")
    return found


def _run(settings: VerifySettings, prompts: Sequence[Prompt], pair: SubjectPair, *, as_json: bool, quiet: bool) -> int:
    from dflash_serve.verify.amount import amount_of
    from dflash_serve.verify.report import EXIT_CODES, report_of, show
    from dflash_serve.verify.verification import CONTEXT, Verification
    from dflash_serve.verify.warm import WarmVerification

    output, plan = settings.output, settings.plan(prompts, pair)
    belongs_to = {"plan": plan.model_dump(mode="json"), "subjects": pair.descriptions}
    with resumable(output, belongs_to, "finished answers", resume=settings.resume) as store:
        answers = 3 * plan.prompts if settings.warm else amount_of(plan, prompts, CONTEXT).answers
        with shown(quiet=quiet), doing("verifying", answers) as work:

            def told(what: str, count: int) -> None:
                work.part = what
                work.advance(count)

            if settings.warm:
                findings = WarmVerification(plan, prompts, pair, settings.pool_tokens, told).run()
            else:
                findings = Verification(plan, prompts, pair, store, told).run()
        report = report_of(plan, pair.descriptions, findings)
        write_json(output, report)
    console = Console(highlight=False, quiet=as_json, emoji=False)
    show(report, console)
    if as_json:
        typer.echo(output.read_text(encoding="utf-8"), nl=False)
    elif not quiet:
        console.print(f"report: {output}", soft_wrap=True, markup=False)
    return EXIT_CODES[findings.verdict]
