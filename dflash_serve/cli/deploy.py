"""`dflash-serve deploy`: a deployment as values of the Helm chart or as Kubernetes manifests."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
import yaml

from dflash_serve.adapter.launch import HINT
from dflash_serve.adapter.registry import installed, server_backend
from dflash_serve.cli import options
from dflash_serve.cli.options import name_drafter
from dflash_serve.cli.serve import prepared, tell_choices
from dflash_serve.common.files import write_whole
from dflash_serve.deploying.chart import Form, Workload, render, workload_of
from dflash_serve.deploying.dynamo import dynamo_problems, graph
from dflash_serve.deployment.pair import both_halves
from dflash_serve.deployment.variables import COST_TABLE, SURVIVAL
from dflash_serve.errors import UserError, did_you_mean, raise_problems

NAME = re.compile(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?")
"""Names that Kubernetes and Helm take; a Helm release has at most 53 characters."""
ELSEWHERE = ("compose", "kserve")  # Systems that have an example file instead of a form
IN_CONTAINER = ("/models/", "/build/")  # Folders that the chart mounts into every container
RenderForm = Annotated[str | None, typer.Option("--render", help=f"Form to render: {', '.join(get_args(Form))}.")]
Name = Annotated[str, typer.Option(help="Name of the release.")]
PLACEHOLDER = f"registry.example/engine@sha256:{64 * '0'}"
IMAGE = "Container image, REPOSITORY@sha256:...; without it the values have none, and manifests a placeholder."
Image = Annotated[str | None, typer.Option(help=IMAGE)]
Output = Annotated[Path | None, typer.Option(help="File to write the documents to. [default: the terminal]")]
PREPARE = "Folder to write the engine's files to, instead of rendering."
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
    """Check a deployment, and render it as Helm values or Kubernetes manifests."""
    if (form is None) == (prepare is None):
        raise UserError(
            "give one of --render and --prepare", where="deploy", do=f"--render {' | '.join(get_args(Form))}"
        )
    if form is not None and form not in get_args(Form):
        do = did_you_mean(form, get_args(Form)) or f"there are: {', '.join(get_args(Form))}"
        if form in ELSEWHERE:
            do = f"start from examples/deploy/{form}.yaml"
        raise UserError(f"no form {form!r}", where="--render", do=do)
    if prepare is not None:
        unused = ("name", "image", "output", "as_json")
        options.refuse_ignored(context, unused, "nothing is rendered with --prepare")
    if backend_name is None:
        raise UserError("no engine is named", where="--backend", do=f"name one: {', '.join(installed())}")
    chosen = server_backend(backend_name)
    described = options.load_described(deployment, options.engine_arguments(context, backend_name), quiet=quiet)
    described = name_drafter(described, chosen, quiet=quiet)
    workload = workload_of(name, backend_name, described, image)
    launches = [chosen.launch(half) for half in both_halves(workload.deployment)]
    raise_problems(launches[0].problems, hint=HINT)  # of both halves of a pair, and of the two together
    if prepare is not None:  # both halves of a pair read the same files
        prepared(chosen.launch(both_halves(described)[0]), prepare)
        return
    workload = replace(workload, decode_host_bytes=launches[-1].host_bytes)
    _require_deployable(workload)
    if form == "dynamo":
        raise_problems(dynamo_problems(workload, launches))
    if form in ("manifests", "dynamo") and image is None:
        workload = replace(workload, image=PLACEHOLDER)
        typer.echo(f"dflash-serve: note: --image is not given: {PLACEHOLDER} stands in its place", err=True)
    text = graph(workload, launches) if form == "dynamo" else render(workload, cast(Form, form))
    if as_json:
        text = json.dumps([document for document in yaml.safe_load_all(text) if document], indent=2) + "\n"
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_whole(output, text, do="name another --output")
    if not quiet:
        tell_choices(launches[-1])


def _require_deployable(workload: Workload) -> None:
    """Refuses a deployment that only this machine could serve.

    Raises:
        UserError: a name that Kubernetes refuses, or a file or folder of this machine.
    """
    deployment = workload.deployment
    if not NAME.fullmatch(workload.name):
        do = "use at most 53 lower-case letters, digits and dashes, a letter first"
        raise UserError(f"{workload.name!r} is no name for Kubernetes", where="--name", do=do)
    if deployment.serving.api_key_file is not None:
        do = "leave it out, and set secrets.apiKeys.name in the chart's values"
        raise UserError("this file of this machine is not in the container", where="serving.api_key_file", do=do)
    for variable in (COST_TABLE, SURVIVAL):
        if variable in os.environ:
            typer.echo(
                f"dflash-serve: note: {variable} is set on this machine only; set it in the container too (env)",
                err=True,
            )
    for key, model in (("target.model", deployment.target), ("drafter.model", deployment.drafter)):
        if model is None or not Path(model.model).is_dir():
            continue
        if not model.model.startswith(IN_CONTAINER):
            typer.echo(f"dflash-serve: note: {key}: mount {model.model} at the same path in the container", err=True)
