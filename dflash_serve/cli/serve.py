"""`dflash-serve serve`: check a deployment, then become the engine's own server. Nothing of ours stays in between."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from dflash_serve.backend import EMBEDDED, Command, ServerBackend, server_backend
from dflash_serve.cli import options
from dflash_serve.cli.drafters import name_drafter
from dflash_serve.cli.rehearsal import rehearse, tell_choices
from dflash_serve.common.processes import require_program
from dflash_serve.deployment import Deployment, load_deployment
from dflash_serve.errors import UserError, raise_problems

Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest prompt and answer together, in tokens.")]
MaxQueued = Annotated[int | None, typer.Option(help="Requests that may wait; others get a 429 (SGLang: 503).")]
OWN = ("drain_seconds", "acceptance_metrics")
"""Options of the embedded engine's server."""
DrainSeconds = Annotated[float | None, typer.Option(help="How long requests may go on after SIGTERM, in seconds.")]
LogFormat = Annotated[str | None, typer.Option(help="Log lines: text, or json, one object each. [default: text]")]
AcceptanceMetrics = Annotated[str | None, typer.Option(help="Acceptance in responses: none, summary or detailed.")]
Folder = Annotated[Path | None, typer.Option(help="Folder for what the engine reads. [default: a new temporary one]")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print every problem, the engine's command, its files and what was chosen, and stop; nothing is written."
        " With --quiet the command alone.",
    ),
]
DRY_FOLDER = Path(tempfile.gettempdir(), "dflash-serve")
DryJson = Annotated[bool, typer.Option("--json", help="With --dry-run: all of it as JSON.")]
ShowFiles = Annotated[bool, typer.Option("--show-files", help="With --dry-run: what would stand in the files, too.")]


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
    served_model_name: options.ServedName = None,
    api_key_file: options.KeyFile = None,
    log_format: LogFormat = None,
    drain_seconds: DrainSeconds = None,
    acceptance_metrics: AcceptanceMetrics = None,
    folder: Folder = None,
    dry_run: DryRun = False,
    show_files: ShowFiles = False,
    as_json: DryJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Serve a target and its drafter behind an OpenAI-compatible API.

    Words after -- go to the engine's own server as they are: `serve deployment.yaml -- --mem-fraction-static 0.9`.
    """
    options.require_target("serve", deployment, target)
    backend = server_backend(backend_name)
    flags = {**options.deployment_flags(context.params), **options.engine_arguments(context, backend_name, *OWN)}
    described = name_drafter(load_deployment(deployment, flags), backend, quiet=quiet)
    if dry_run:
        report = rehearse(backend, described, folder or DRY_FOLDER, host=host, port=port)
        return report.show(as_json=as_json, quiet=quiet, show_files=show_files)
    raise_problems(backend.check(described), hint="--dry-run shows all")
    require_program(backend.command(described, DRY_FOLDER, host=host, port=port).argv, backend.name)
    folder = prepared(backend, described, folder, quiet=quiet)
    become(backend.command(described, folder, host=host, port=port), backend.name)


def prepared(chosen: ServerBackend, deployment: Deployment, folder: Path | None, *, quiet: bool) -> Path:
    """The folder with what the engine reads; once it is there, what was chosen is told.

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
    tell_choices(chosen, deployment, quiet=quiet)
    return folder


def become(command: Command, backend_name: str) -> None:
    """Replaces this process by the engine's server: signals reach it, and its exit code is ours.

    Raises:
        UserError: it cannot be started.
    """
    sys.stdout.flush()
    try:
        os.execvpe(command.argv[0], command.argv, {**os.environ, **command.env})  # noqa: S606
    except OSError as error:
        do = f"install what --backend {backend_name} needs"
        raise UserError(f"cannot be started ({error.strerror})", where=command.argv[0], do=do) from None
