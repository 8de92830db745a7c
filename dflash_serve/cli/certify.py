"""`dflash-serve certify`: accept a deployment or not. Exit codes: 0 accepted, 1 refused, 3 could not tell.

With `--compare`: 0 = not worse, 1 = worse.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from dflash_serve.adapter.registry import EMBEDDED
from dflash_serve.answers.prompts import BUNDLED, read_prompt_set
from dflash_serve.cli import bench as sweep
from dflash_serve.cli import options
from dflash_serve.cli.verify import WithMetrics, WithoutMetrics
from dflash_serve.common.extras import need
from dflash_serve.common.files import write_whole
from dflash_serve.common.http import read_api_key
from dflash_serve.common.progress import doing, shown
from dflash_serve.common.provenance import versions
from dflash_serve.common.store import resumable
from dflash_serve.errors import UserError

if TYPE_CHECKING:
    from dflash_serve.certify.certification import RunningServers

Minutes = Annotated[float, Option(help="Time for everything; what does not fit is listed as not tested.", min=1)]
DatasetName = Annotated[str | None, Option(help=f"{sweep.DATASETS} [default: the bundled prompts]")]
Compare = Annotated[
    tuple[Path, Path] | None, Option(metavar="OLD.json NEW.json", help="Compare two certificates; nothing is run.")
]
WithUrl = Annotated[
    str | None, Option("--url", help="Address of a running server of the deployment, or of a router before several.")
]
WithoutUrl = Annotated[
    str | None, Option("--without-url", help="Address of the same without speculation; goes with --url.")
]
Output = Annotated[Path, Option(help="Folder for the certificate, JSON and HTML, and the working files.")]


def certify(
    context: typer.Context,
    deployment: options.DeploymentFile = None,
    target: options.Target = None,
    drafter: options.Drafter = None,
    backend: options.Backend = EMBEDDED,
    with_url: WithUrl = None,
    without_url: WithoutUrl = None,
    with_metrics_url: WithMetrics = None,
    without_metrics_url: WithoutMetrics = None,
    api_key_file: options.ApiKeyFile = None,
    minutes: Minutes = 15,
    dataset: DatasetName = None,
    concurrency: sweep.Concurrency = "1,8,32",
    max_tokens: sweep.MaxTokens = 128,
    chat_template_kwargs: options.TemplateKwargs = None,
    in_turn: sweep.InTurn = None,
    compare: Compare = None,
    output: Output = Path("certificate"),
    resume: options.Resume = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Say in one verdict whether a deployment is lossless and faster, at which loads, and what is wrong."""
    need("bench", "httpx", "jinja2", "numpy", "prometheus_client", "scipy")
    from dflash_serve.certify import report

    if compare is not None:
        others = context.params.keys() - {"compare", "quiet"}
        options.refuse_ignored(context, sorted(others), "two certificates are compared, and nothing is run")
        worse, lines = report.compare(*map(report.read_certificate, compare))
        typer.echo("\n".join([*lines, "worse" if worse else "not worse"]))
        raise typer.Exit(int(worse))
    if deployment is None and target is None:
        raise UserError("nothing to certify", where="certify", do="give a deployment.yaml, or --target and --drafter")
    if (with_url is None) != (without_url is None):
        lacks = "--url" if with_url is None else "--without-url"
        raise UserError("running servers are compared", where="certify", do=f"give {lacks}, too")
    if with_url is None:
        named = ("with_metrics_url", "without_metrics_url", "api_key_file")
        options.refuse_ignored(context, named, "only running servers have it", "give --url and --without-url, too")
    certificate = _certified({**context.params, **options.engine_arguments(context, backend)})
    report.write_certificate(certificate, output)
    typer.echo((output / report.JSON).read_text(encoding="utf-8") if as_json else "\n".join(certificate.lines))
    if not as_json and not quiet:
        typer.echo(f"report: {output / report.HTML}")
    raise typer.Exit(report.EXIT_CODES[certificate.verdict])


def _certified(given: dict[str, Any]) -> Any:
    from dflash_serve.bench.aiperf import find_aiperf
    from dflash_serve.bench.settings import BenchSettings, require_servers
    from dflash_serve.certify.certification import Certification
    from dflash_serve.certify.report import JSON, conclude

    output: Path = given["output"]
    fixed = {"variants": ("off",), "rounds": 1, "requests_per_user": 1, "min_requests": 4, "temperature": 0.0}
    own = {"ignore_eos": True, "warm_up": False, "dataset": given["dataset"] or str(output / BUNDLED.name)}
    settings = options.settings_of(BenchSettings, given, **own, **fixed)
    servers = _running(given)
    if servers is None:
        require_servers(settings)
    find_aiperf()
    made_by = {**settings.model_dump(mode="json", exclude={"output"}), "versions": versions()}
    made_by |= {} if servers is None else {"urls": [one.base for one in servers]}

    with resumable(output / JSON, made_by, "finished steps", resume=given["resume"]) as store:
        if not given["resume"]:
            shutil.rmtree(output / "work", ignore_errors=True)  # a new certification measures everything anew
        if given["dataset"] is None:  # aiperf takes single turns
            turns = [prompt[0] for prompt in read_prompt_set() if len(prompt) == 1]
            lines = (json.dumps({"prompt": turn["content"]}) for turn in turns if isinstance(turn, Mapping))
            write_whole(Path(settings.dataset), "\n".join(lines) + "\n")
        run = Certification(settings, given["minutes"], store, servers)
        run.tell = (lambda line: None) if given["quiet"] else partial(print, file=sys.stderr)
        with shown(quiet=given["quiet"]), doing(f"certifying in {given['minutes']:g} minutes") as run.step:
            return conclude(run.run())


def _running(given: dict[str, Any]) -> RunningServers | None:
    """The servers that run already; None = the deployment's are started.

    Raises:
        UserError: both are the same, or one cannot be reached or has no metrics.
    """
    from dflash_serve.certify.certification import RunningServers
    from dflash_serve.client.endpoint import Endpoint
    from dflash_serve.verify.subjects import two_servers

    if given["with_url"] is None:
        return None
    key = read_api_key(given["api_key_file"])
    found = RunningServers(
        Endpoint(given["with_url"], api_key=key, metrics_urls=tuple(given["with_metrics_url"] or ())),
        Endpoint(given["without_url"], api_key=key, metrics_urls=tuple(given["without_metrics_url"] or ())),
    )
    two_servers(*found)
    return found
