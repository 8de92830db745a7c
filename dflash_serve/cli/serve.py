"""`dflash-serve serve`: check a deployment, then become the engine's own server; or show all of it, by `--dry-run`."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from dflash_serve.backend import EMBEDDED, Command, server_backend
from dflash_serve.cli import options
from dflash_serve.cli.drafters import name_drafter
from dflash_serve.common.json_log import remark
from dflash_serve.common.processes import require_program
from dflash_serve.deployment import Deployment, load_deployment
from dflash_serve.errors import Problem, UserError, raise_problems
from dflash_serve.server_adapter import HINT, Launch, Preview, resolve

Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest prompt and answer together, in tokens.")]
MaxQueued = Annotated[int | None, typer.Option(help="Requests that may wait; others get a 429 (SGLang: 503).")]
OWN = ("drain_seconds", "acceptance_metrics")  # Options of the embedded engine's server
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
    launch = resolve(backend, described)
    if dry_run:
        report = rehearse(launch, backend.name, described, folder or DRY_FOLDER, host=host, port=port)
        return report.show(as_json=as_json, quiet=quiet, show_files=show_files)
    raise_problems(launch.problems, hint=HINT)
    require_program(launch.command(DRY_FOLDER, host=host, port=port).argv, backend.name)
    folder = prepared(launch, folder)
    if not quiet:
        tell_choices(launch.preview(folder), described)
    become(launch.command(folder, host=host, port=port), backend.name)


def prepared(launch: Launch, folder: Path | None) -> Path:
    """The folder with the files that the engine reads.

    Raises:
        UserError: it cannot be written, or the backend refuses the deployment.
    """
    try:
        folder = folder or Path(tempfile.mkdtemp(prefix="dflash-serve-"))
        launch.prepare(folder)
    except OSError as error:
        do = "free some space, or name another --folder"
        where = str(folder or tempfile.gettempdir())
        raise UserError(f"cannot be written ({error.strerror})", where=where, do=do) from None
    return folder


def tell_choices(told: Preview, deployment: Deployment) -> None:
    """Prints on stderr the choices and the notes of a launch."""
    said = [f"{choice.key} = {choice.value}: {choice.why}" for choice in told.choices]
    for text in (*said, *(f"note: {note}" for note in told.notes)):
        print(remark(text, deployment.serving.log_format), file=sys.stderr)
    sys.stderr.flush()


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


INDENT = "  "


@dataclass(frozen=True)
class Rehearsal:
    """A launch that is shown and not carried out."""

    backend: str
    deployment: Deployment
    folder: Path
    problems: list[Problem]
    command: Command | None  # None = a problem leaves no command
    preview: Preview | None  # None = a problem leaves nothing to show

    def show(self, *, as_json: bool, quiet: bool, show_files: bool) -> None:
        """Prints it: everything as text or JSON, or with `quiet` the command alone; problems then go to stderr.

        Raises:
            typer.Exit: with code 2, where there are problems.
        """
        if as_json:
            typer.echo(json.dumps(self.as_json(), indent=2))
        elif quiet:
            for problem in self.problems:
                typer.echo(f"problem: {problem}", err=True)
            if self.command is not None and not self.problems:
                typer.echo(in_shell(self.command))
        else:
            typer.echo("\n".join(self._lines(show_files)))
        if self.problems:
            raise typer.Exit(2)

    def as_json(self) -> dict[str, object]:
        """A JSON object; a file without text is weights or a secret."""
        told = self.preview or Preview()
        return {
            "backend": self.backend,
            "command": list(self.command.argv) if self.command else None,
            "environment": dict(self.command.env) if self.command else None,
            "folder": str(self.folder),
            "files": [asdict(file) for file in told.files],
            "problems": [asdict(problem) for problem in self.problems],
            "chosen": [asdict(choice) for choice in told.choices],
            "notes": list(told.notes),
            "deployment": self.deployment.model_dump(mode="json", exclude_defaults=True),
        }

    def _lines(self, show_files: bool) -> Iterator[str]:
        told = self.preview
        if not self.problems:
            yield f"{self.backend}: no problem found"
        else:
            yield "problems"
            yield from (f"{INDENT}{problem}" for problem in self.problems)
        if self.command is not None:
            yield "environment" if self.command.env else "environment: nothing is added"
            yield from (f"{INDENT}{name}={value}" for name, value in self.command.env.items())
            yield "command"
            yield f"{INDENT}{shlex.join(self.command.argv)}"
        if told is None:
            return
        yield f"files in {self.folder}" + ("" if show_files else " (--show-files shows what stands in them)")
        for file in told.files:
            yield f"{INDENT}{file.name}: {file.about}"
            if show_files and file.text is not None:
                yield from (f"{INDENT}{INDENT}| {line}" for line in file.text.splitlines())
        yield "chosen, where the deployment leaves it open"
        yield from (f"{INDENT}{choice.key} = {choice.value}: {choice.why}" for choice in told.choices)
        if told.notes:
            yield f"what {self.backend} does otherwise"
            yield from (f"{INDENT}{note}" for note in told.notes)


def rehearse(launch: Launch, backend: str, deployment: Deployment, folder: Path, *, host: str, port: int) -> Rehearsal:
    """Problems, command, files and choices of a launch; nothing is written or started."""
    problems = launch.problems
    command, told = None, None
    try:
        command = launch.command(folder, host=host, port=port)
        told = launch.preview(folder)
    except UserError as error:  # most often a problem has said it already
        problems = problems or [Problem(error.what, error.where, error.do)]
    return Rehearsal(backend, deployment, folder, problems, command, told)


def in_shell(command: Command) -> str:
    """The command as one line for a POSIX shell, its own environment first."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in command.env.items()]
    return " ".join([*settings, shlex.join(command.argv)])
