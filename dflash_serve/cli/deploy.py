"""`dflash-serve deploy`: a deployment as chart values, manifests, a Dynamo graph, a KServe service, a compose file."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
import yaml

from dflash_serve.backend import installed, server_backend
from dflash_serve.cli import options
from dflash_serve.cli.drafters import name_drafter
from dflash_serve.cli.serve import prepared, tell_choices
from dflash_serve.common.files import write_whole
from dflash_serve.cost_table import COST_TABLE, SURVIVAL
from dflash_serve.deploying.render import Form, render
from dflash_serve.deploying.workload import Workload, workload_of
from dflash_serve.deployment import load_deployment
from dflash_serve.errors import UserError, did_you_mean, raise_problems
from dflash_serve.server_adapter import HINT, resolve

NAME = re.compile(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?")
"""What Kubernetes, Helm and Compose all take; Helm's releases end at 53 characters."""
IN_CONTAINER = ("/models/", "/build/")
"""Folders that a container of ours has, as its volumes are mounted."""
RenderForm = Annotated[str | None, typer.Option("--render", help=f"Form to render: {', '.join(get_args(Form))}.")]
Name = Annotated[str, typer.Option(help="Name of the release, service or project.")]
IMAGE = "Container image, REPOSITORY@sha256:... [default: as deploy/docker names it]"
Image = Annotated[str | None, typer.Option(help=IMAGE)]
Output = Annotated[Path | None, typer.Option(help="File for what is rendered. [default: the terminal]")]
PREPARE = "Folder to write what the engine reads to, instead of rendering."
Prepare = Annotated[Path | None, typer.Option(help=PREPARE)]
BackendName = Annotated[
    str | None, typer.Option("--backend", help="Installed backend: torch, sglang, tensorrt-llm, vllm.")
]


def deploy(
    context: typer.Context,
    deployment: options.RequiredDeploymentFile,
    form: RenderForm = None,
    backend_name: BackendName = None,
    name: Name = "dflash-serve",
    image: Image = None,
    output: Output = None,
    prepare: Prepare = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Render a deployment for Kubernetes, Dynamo, KServe or Docker Compose. Its problems are found first."""
    if (form is None) == (prepare is None):
        raise UserError("one of --render and --prepare", where="deploy", do=f"--render {' | '.join(get_args(Form))}")
    if form is not None and form not in get_args(Form):
        do = did_you_mean(form, get_args(Form)) or f"there are: {', '.join(get_args(Form))}"
        raise UserError(f"no form {form!r}", where="--render", do=do)
    if backend_name is None:
        raise UserError("which engine?", where="--backend", do=f"name one: {', '.join(installed())}")
    chosen = server_backend(backend_name)
    described = load_deployment(deployment, options.engine_arguments(context, backend_name))
    described = name_drafter(described, chosen, quiet=quiet)
    workload = workload_of(name, backend_name, described, image)
    launch = resolve(chosen, workload.deployment)
    raise_problems(launch.problems, hint=HINT)
    if prepare is not None:
        prepared(resolve(chosen, described), prepare)
        return
    _require_deployable(workload)
    text = render(workload, cast(Form, form))
    if as_json:
        text = json.dumps([document for document in yaml.safe_load_all(text) if document], indent=2) + "\n"
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_whole(output, text, do="name another --output")
    if not quiet:
        tell_choices(launch.preview(Path()), workload.deployment)


def _require_deployable(workload: Workload) -> None:
    """What runs here and would not in a container elsewhere.

    Raises:
        UserError: a name that Kubernetes refuses, or a file or folder of this machine.
    """
    deployment = workload.deployment
    if not NAME.fullmatch(workload.name):
        do = "use at most 53 lower-case letters, digits and dashes, a letter first"
        raise UserError(f"{workload.name!r} is no name for Kubernetes", where="--name", do=do)
    if deployment.serving.api_key_file is not None:
        do = "leave it out; the chart has secrets.apiKeys.name, others a gateway"
        raise UserError("a file of this machine is not in the container", where="serving.api_key_file", do=do)
    for variable in (COST_TABLE, SURVIVAL):
        if variable in os.environ:
            typer.echo(f"dflash-serve: note: {variable} is this machine's; set it in the container, too", err=True)
    for key, model in (("target.model", deployment.target), ("drafter.model", deployment.drafter)):
        if model is None or not Path(model.model).is_dir():
            continue
        if not Path(model.model).is_absolute():
            do = "give a hub id, or an absolute path that is mounted there, such as /models/..."
            what = f"{model.model} is a folder below this one, and no container has it"
            raise UserError(what, where=key, do=do)
        if not model.model.startswith(IN_CONTAINER):
            typer.echo(f"dflash-serve: note: {key}: mount {model.model} at the same path in the container", err=True)
