"""`dflash-serve serve`: check a deployment, then become the engine's own server. Nothing of ours stays in between."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_serve.backend import EMBEDDED, Command, ServerBackend, server_backend
from dflash_serve.deployment import Deployment, load_deployment
from dflash_serve.errors import UserError, raise_problems


def serve(
    deployment: Annotated[Path | None, typer.Argument(help="YAML file; flags and environment go before it.")] = None,
    target: Annotated[str | None, typer.Option(help="Hub id, folder, or the bundled smollm2.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Likewise; without one there is no speculation.")] = None,
    backend_name: Annotated[str, typer.Option("--backend", help="Which engine serves.")] = EMBEDDED,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where to listen; 0 takes a free one.", min=0, max=65535)] = 8000,
    block_size: Annotated[int | None, typer.Option(help="B, the anchor counted. [default: the drafter's]")] = None,
    width: Annotated[str | None, typer.Option(help="Slots verified a step: a number, auto or off.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16.")] = None,
    max_batch_size: Annotated[int | None, typer.Option(help="Requests that run at once.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of prompt and answer together.")] = None,
    max_queued_requests: Annotated[int | None, typer.Option(help="Requests that may wait; more get 429.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call it. [default: the target]")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="One key a line; without, the server is open.")] = None,
    drain_seconds: Annotated[float | None, typer.Option(help="How long SIGTERM lets requests go on.")] = None,
    acceptance_metrics: Annotated[
        str | None, typer.Option(help="Acceptance in responses: none, summary or detailed.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where what the engine reads is written. [default: a new temporary one]")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Check, print the command and stop; nothing is written.")] = False,
) -> None:
    """Serve a target and its drafter behind an OpenAI-compatible API."""
    flags: dict[str, Any] = {
        "target": {"model": target},
        "drafter": {"model": drafter},
        "speculation": {"block_size": block_size, "width": width},
        "hardware": {"dtype": dtype},
        "limits": {
            "max_batch_size": max_batch_size,
            "max_model_len": max_model_len,
            "max_queued_requests": max_queued_requests,
        },
    }
    chosen = server_backend(backend_name)
    environment = server_settings(
        chosen,
        {
            "served-model-name": served_model_name,
            "api-key-file": api_key_file and api_key_file.resolve(),
            "drain-seconds": drain_seconds,
            "acceptance-metrics": acceptance_metrics,
        },
    )
    if deployment is None and target is None:
        raise UserError("nothing to serve", where="serve", do="give a deployment.yaml, or --target and --drafter")
    described = load_deployment(deployment, flags)
    raise_problems(chosen.check(described))
    if not dry_run:
        folder = prepared(chosen, described, folder)
    command = chosen.command(described, folder or Path(tempfile.gettempdir(), "dflash-serve"), host=host, port=port)
    command = Command(command.argv, {**command.env, **environment})
    if dry_run:
        typer.echo(in_shell(command))
    else:
        become(command, chosen.name)


def server_settings(chosen: ServerBackend, options: Mapping[str, object]) -> dict[str, str]:
    """Environment variables for the options that are given (not None), as the engine's own server reads them.

    Raises:
        UserError: its server has no such options.
    """
    given = {name: str(value) for name, value in options.items() if value is not None}
    flags = chosen.facts.server_flags
    unknown = ", ".join(f"--{name}" for name in given if name not in flags)
    if unknown:
        do = "leave them out, or give them to the engine itself under engine_args"
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
