"""`dflash-serve verify`: tests that speculation is lossless. Exit codes: 0 lossless, 1 not lossless, 3 undecided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dflash_serve.adapter.registry import EMBEDDED, backend, server_backend
from dflash_serve.answers.engine import Prompt
from dflash_serve.answers.prompts import prompts_digest, read_prompt_set, template_kwargs
from dflash_serve.cli import options
from dflash_serve.cli.options import described_pair
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.common.extras import need
from dflash_serve.common.http import read_api_key
from dflash_serve.common.store import resumable
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError
from dflash_serve.verify.questions import FEWEST, VerifyPlan
from dflash_serve.verify.subjects import SubjectPair, engine_in_process, server_started_twice, two_servers

OF_OURS = ("deployment", "target", "drafter", "backend_name", "block_size", "width")
"""Options of a deployment, which running servers cannot follow."""
BUNDLED_LIMITS = {"max_batch_size": 16, "max_model_len": 1024}
EMBEDDED_SAMPLES, SERVER_SAMPLES = 256, 1024
"""Four times as many samples show deviations half as large. The embedded engine keeps seeds, which show more.

There are as many short answers under load."""

WithUrl = Annotated[str | None, typer.Option("--with", help="Address of a running server that speculates.")]
WithoutUrl = Annotated[str | None, typer.Option("--without", help="Address of the same server without speculation.")]
WithMetrics = Annotated[list[str] | None, typer.Option(help=options.METRICS_URL.format("--with's engine"))]
WithoutMetrics = Annotated[list[str] | None, typer.Option(help=options.METRICS_URL.format("--without's engine"))]
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
    output: options.Report = Path("verify-report.json"),
    resume: options.Resume = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Test that speculation changes no answer, on any engine; or show the changes."""
    need("prove", "httpx", "numpy", "prometheus_client", "scipy")
    if samples and samples < FEWEST:
        do = f"give {FEWEST} or more, or 0 to verify greedy decoding alone"
        raise UserError(f"{samples} samples a side show nothing", where="--samples", do=do)
    asked = read_prompt_set(prompts, raw=raw, variables=template_kwargs(chat_template_kwargs))
    if with_url or without_url:
        options.refuse_ignored(
            context, OF_OURS, "running servers have their own", "leave it out, or --with and --without"
        )
        if options.engine_arguments(context, backend_name):
            raise UserError("running servers have their own arguments", where="--", do="leave them out")
        pair = _servers(context.params)
    else:
        named = ("with_metrics_url", "without_metrics_url", "model", "api_key_file")
        options.refuse_ignored(context, named, "only running servers have it", "give --with, too")
        served = {**context.params, "api_key_file": None}  # the option's file is the key of a running server
        flags = {**options.deployment_flags(served), **options.engine_arguments(context, backend_name)}
        described = _speculating(deployment, flags, backend_name)
        if backend_name == EMBEDDED:
            options.refuse_ignored(context, ("concurrency",), "the embedded engine runs here, and no server is asked")
            pair = engine_in_process(described)
        else:
            pair = server_started_twice(server_backend(backend_name), described, concurrency=concurrency)
    raise typer.Exit(_run(_plan(context.params, asked, pair), asked, pair, context.params))


def _servers(given: Mapping[str, Any]) -> SubjectPair:
    """The two running servers.

    Raises:
        UserError: only one is given, or the number format is not one that is verified.
    """
    urls = (given["with_url"], given["without_url"])
    if None in urls:
        missing = "--without" if urls[0] else "--with"
        raise UserError("two servers are compared", where="verify", do=f"give {missing}, too")
    _refuse_other_formats(given["dtype"])
    key = read_api_key(given["api_key_file"])
    metrics = (tuple(given[f"{side}_metrics_url"] or ()) for side in ("with", "without"))
    shared = {"model": given["model"], "api_key": key, "concurrency": given["concurrency"]}
    return two_servers(*(Endpoint(url, **shared, metrics_urls=each) for url, each in zip(urls, metrics, strict=True)))


def _speculating(path: Path | None, flags: Mapping[str, Any], backend_name: str) -> Deployment:
    found = described_pair(path, flags, backend(backend_name), limits=BUNDLED_LIMITS)
    if found.drafter is None or found.speculation.width in ("off", 1):
        raise UserError("it does not speculate", where=str(path or "verify"), do="name a drafter, and no width of off")
    return found


def _plan(given: Mapping[str, Any], asked: Sequence[Prompt], pair: SubjectPair) -> VerifyPlan:
    dtype = pair.dtype or given["dtype"]
    _refuse_other_formats(dtype)
    exact, samples, same_seeds = dtype == "float32", given["samples"], given["same_seeds"]
    if samples is None:
        samples = EMBEDDED_SAMPLES if pair.embedded else SERVER_SAMPLES
    return VerifyPlan(
        prompts=min(given["num_prompts"] or len(asked), len(asked)),
        prompts_sha256=prompts_digest(asked),
        chat_template_kwargs=template_kwargs(given["chat_template_kwargs"]),
        samples=samples,
        dtype="float32" if exact else "bfloat16",
        same_seeds=pair.embedded and exact if same_seeds is None else same_seeds,
        **{name: given[name] for name in ("max_tokens", "long_tokens", "false_alarm", "penalties")},
    )


def _refuse_other_formats(dtype: str | None) -> None:
    if dtype not in (None, "auto", "float32", "bfloat16"):
        raise UserError(f"{dtype!r} is not float32 or bfloat16", where="--dtype")


def _run(plan: VerifyPlan, prompts: Sequence[Prompt], pair: SubjectPair, given: Mapping[str, Any]) -> int:
    from dflash_serve.verify.report import EXIT_CODES, report_of, show, write_report
    from dflash_serve.verify.verification import Verification

    output, as_json, quiet = given["output"], given["as_json"], given["quiet"]
    belongs_to = {"plan": plan.model_dump(mode="json"), "subjects": pair.descriptions}
    with resumable(output, belongs_to, "finished answers", resume=given["resume"]) as store:
        with _progress(quiet=quiet) as progress:
            findings = Verification(plan, prompts, pair, store, progress).run()
        report = report_of(plan, pair.descriptions, findings)
        write_report(report, output)
    console = Console(highlight=False, quiet=as_json, emoji=False)
    show(report, console)
    if as_json:
        typer.echo(output.read_text(encoding="utf-8"), nl=False)
    elif not quiet:
        console.print(f"report: {output}", soft_wrap=True, markup=False)
    return EXIT_CODES[findings.verdict]


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Any]:
    with Console(stderr=True, quiet=quiet).status("verifying") as status:
        counts = Counter[str]()

        def told(what: str, count: int) -> None:
            counts[what] += count
            status.update(f"{what}: {counts[what]} answers")

        yield told
