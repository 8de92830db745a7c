"""`dflash-serve deploy`: a deployment as chart values, manifests, a Dynamo graph, a KServe service, a compose file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from dflash_serve.backend import EMBEDDED, server_backend
from dflash_serve.cli import options
from dflash_serve.cli.serve import prepared
from dflash_serve.common.files import write_whole
from dflash_serve.deploying.render import Form, render
from dflash_serve.deploying.workload import Workload
from dflash_serve.deployment import load_deployment
from dflash_serve.errors import UserError, raise_problems


def deploy(
    deployment: Annotated[Path, typer.Argument(help=options.DEPLOYMENT)],
    form: Annotated[str | None, typer.Option("--render", help=f"Form to render: {', '.join(get_args(Form))}.")] = None,
    backend_name: options.Backend = EMBEDDED,
    name: Annotated[str, typer.Option(help="Name of the release, service or project.")] = "dflash-serve",
    image: Annotated[
        str | None, typer.Option(help="Container image, REPOSITORY@sha256:... [default: as deploy/docker names it]")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="File for what is rendered. [default: the terminal]")] = None,
    prepare: Annotated[
        Path | None, typer.Option(help="Folder to write what the engine reads to, instead of rendering.")
    ] = None,
) -> None:
    """Render a deployment for Kubernetes, Dynamo, KServe or Docker Compose. Its problems are found first."""
    if (form is None) == (prepare is None):
        raise UserError("one of --render and --prepare", where="deploy", do=f"--render {' | '.join(get_args(Form))}")
    if form is not None and form not in get_args(Form):
        raise UserError(f"no form {form!r}", where="--render", do=f"there are: {', '.join(get_args(Form))}")
    described, chosen = load_deployment(deployment), server_backend(backend_name)
    raise_problems(chosen.check(described))
    if prepare is not None:
        prepared(chosen, described, prepare)
        return
    text = render(Workload(name, backend_name, described, image), cast(Form, form))
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_whole(output, text, do="name another --output")
