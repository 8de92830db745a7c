"""`dflash-serve serve`: check a deployment, then become the engine's own server. Nothing of ours stays in between."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from dflash_serve.backend import EMBEDDED, Command, ContractedBackend, ServerBackend, server_backend
from dflash_serve.cli import options
from dflash_serve.deployment import Deployment, load_deployment
from dflash_serve.errors import UserError, raise_problems

SERVER_OPTIONS = ("served-model-name", "api-key-file", "drain-seconds", "acceptance-metrics")
"""Options that only some engines' own servers have, as `EngineFacts.server_flags` calls them."""

Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest prompt and answer together, in tokens.")]
MaxQueued = Annotated[int | None, typer.Option(help="Requests that may wait; further ones are answered with 429.")]
ServedName = Annotated[str | None, typer.Option(help="Name that clients use for the model. [default: the target]")]
KeyFile = Annotated[Path | None, typer.Option(help="File of API keys, one a line; without it the server is open.")]
DrainSeconds = Annotated[float | None, typer.Option(help="How long requests may go on after SIGTERM, in seconds.")]
AcceptanceMetrics = Annotated[str | None, typer.Option(help="Acceptance in responses: none, summary or detailed.")]
Folder = Annotated[Path | None, typer.Option(help="Folder for what the engine reads. [default: a new temporary one]")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check, print the engine's command and stop; nothing is written.")
]


def serve(
    context: typer.Context,
    deployment: options.DeploymentFile = None,
    target: options.Target = None,
    drafter: options.Drafter = None,
    backend_name: options.Backend = EMBEDDED,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    block_size: options.BlockSize = None,
    width: options.Width = None,
    dtype: options.Dtype = None,
    max_batch_size: options.MaxBatchSize = None,
    max_model_len: MaxModelLen = None,
    max_queued_requests: MaxQueued = None,
    served_model_name: ServedName = None,
    api_key_file: KeyFile = None,
    drain_seconds: DrainSeconds = None,
    acceptance_metrics: AcceptanceMetrics = None,
    folder: Folder = None,
    dry_run: DryRun = False,
) -> None:
    """Serve a target and its drafter behind an OpenAI-compatible API."""
    backend, key = server_backend(backend_name), api_key_file and api_key_file.resolve()
    named = (served_model_name, key, drain_seconds, acceptance_metrics)
    environment = server_settings(backend, dict(zip(SERVER_OPTIONS, named, strict=True)))
    if deployment is None and target is None:
        raise UserError("nothing to serve", where="serve", do="give a deployment.yaml, or --target and --drafter")
    described = load_deployment(deployment, options.deployment_flags(context.params))
    raise_problems(backend.check(described))
    place = (folder or Path(tempfile.gettempdir(), "dflash-serve")) if dry_run else prepared(backend, described, folder)
    command = backend.command(described, place, host=host, port=port)
    command = Command(command.argv, {**command.env, **environment})
    if dry_run:
        typer.echo(in_shell(command))
        for line in backend.contract() if isinstance(backend, ContractedBackend) else ():
            typer.echo(line, err=True)
    else:
        become(command, backend.name)


def server_settings(chosen: ServerBackend, asked: Mapping[str, object]) -> dict[str, str]:
    """Environment variables for the options that are given (not None), as the engine's own server reads them.

    Raises:
        UserError: its server has no such options.
    """
    given = {name: str(value) for name, value in asked.items() if value is not None}
    flags = chosen.facts.server_flags
    unknown = ", ".join(f"--{name}" for name in given if name not in flags)
    if unknown:
        do = "leave them out"
        raise UserError(f"this engine's server does not have: {unknown}", where=f"--backend {chosen.name}", do=do)
    return {flags[name]: value for name, value in given.items()}


def prepared(chosen: ServerBackend, deployment: Deployment, folder: Path | None) -> Path:
    """The folder with what the engine reads.

    Raises:
        UserError: it cannot be written, or the backend refuses the deployment.
    """
    try:
        folder = folder or Path(tempfile.mkdtemp(prefix="dflash-serve-"))
        chosen.prepare(deployment, folder)
    except OSError as error:
        do = "free some space, or name another --folder"
        where = str(folder or tempfile.gettempdir())
        raise UserError(f"cannot be written ({error.strerror})", where=where, do=do) from None
    return folder


def in_shell(command: Command) -> str:
    """The command as one line for a POSIX shell, its own environment first."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in command.env.items()]
    return " ".join([*settings, shlex.join(command.argv)])


def become(command: Command, backend_name: str) -> None:
    """Replaces this process by the engine's server: signals reach it, and its exit code is ours."""
    sys.stdout.flush()
    try:
        os.execvpe(command.argv[0], command.argv, {**os.environ, **command.env})  # noqa: S606
    except OSError as error:
        do = f"install what --backend {backend_name} needs"
        raise UserError(f"cannot be started ({error.strerror})", where=command.argv[0], do=do) from None
