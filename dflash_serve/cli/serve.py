"""`dflash-serve serve`: check a deployment, then become the engine's own server; or show all of it, by `--dry-run`."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_serve.adapter.registry import EMBEDDED, server_backend
from dflash_serve.cli import options
from dflash_serve.cli.options import name_drafter
from dflash_serve.common.files import remove_temporary, temporary_folder
from dflash_serve.common.json_log import remark
from dflash_serve.common.terminal import broken
from dflash_serve.errors import Problem, UserError, listed, raise_problems

if TYPE_CHECKING:
    from dflash_serve.adapter.protocol import Choice, Command, Launch, PreparedFile, ServerBackend
    from dflash_serve.deployment.description import Deployment
    from dflash_serve.deployment.layers import GivenValue, Layers

Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest prompt and answer together, in tokens.")]
MaxQueued = Annotated[int | None, typer.Option(help="Requests that may wait; others get a 429 (SGLang: 503).")]
OWN = ("drain_seconds", "acceptance_metrics")  # Options of the embedded engine's server
Role = Annotated[str | None, typer.Option(help="Half of the deployment's pair that this server is: prefill or decode.")]
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
INDENT = "  "
WITHOUT_DRAFTER = "no drafter is named: it serves without speculation; --drafter auto takes the best one that is known"
DRAFTER_UNUSED = "speculation.width is off: it serves without speculation, and does not use the drafter"
BUNDLED_PAIR = "nothing is named: it serves the bundled pair, --target smollm2 --drafter smollm2"
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
    role: Role = None,
    folder: Folder = None,
    dry_run: DryRun = False,
    show_files: ShowFiles = False,
    as_json: DryJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Serve a target and its drafter behind an OpenAI-compatible API.

    Words after -- go to the engine's own server as they are:
    `serve deployment.yaml --backend sglang -- --mem-fraction-static 0.9`.
    """
    _name_pair(context.params)
    _refuse_ignored(context, embedded=backend_name == EMBEDDED, dry_run=dry_run)
    backend = server_backend(backend_name)
    layers = _layers(context, deployment, backend_name)
    chosen = name_drafter(layers.deployment, backend, quiet=quiet)
    if not quiet and not dry_run:
        options.tell_variables(layers)
    if not quiet and (why := _plain_because(chosen, backend)):
        _remark(why, chosen)
    launch = backend.launch(chosen)
    problems = _problems(launch, quiet=quiet)
    if dry_run:
        found = shown_launch(backend.name, launch, folder or _dry_folder(), host, port, layers.given)
        return show_launch(found, as_json=as_json, quiet=quiet, files=show_files)
    _require_startable(launch, problems, host, port, backend.name)
    folder = prepared(launch, folder)
    try:
        if not quiet:
            tell_choices(launch)
        become(launch.command(folder, host=host, port=port), backend.name)
    except (UserError, KeyboardInterrupt):  # an embedded server that has started removes it itself
        remove_temporary(folder)
        raise


def _name_pair(given: dict[str, Any]) -> None:
    """Fills in the bundled pair where the embedded engine serves and nothing is named.

    Raises:
        UserError: no target is named.
    """
    file, target, drafter = (given[name] for name in ("deployment", "target", "drafter"))
    if given["backend_name"] != EMBEDDED or options.names_pair(file, target, drafter):
        return options.require_target("serve", file, target)
    given |= {"target": options.BUNDLED, "drafter": options.BUNDLED}
    if not given["quiet"]:
        print(remark(BUNDLED_PAIR, given["log_format"] or "text"), file=sys.stderr)


def _layers(context: typer.Context, file: Path | None, backend_name: str) -> Layers:
    """The deployment; the words after `--` are arguments of the half that starts, where it is a pair."""
    from dflash_serve.deployment.layers import load_layers

    flags, words = options.deployment_flags(context.params), options.engine_arguments(context, backend_name, *OWN)
    found = load_layers(file, {**flags, **words})
    if words and found.deployment.pair is not None and found.deployment.role != "whole":
        return load_layers(file, {**flags, "pair": {found.deployment.role: words}})
    return found


def _refuse_ignored(context: typer.Context, *, embedded: bool, dry_run: bool) -> None:
    if not embedded:
        do = f"leave it out, or serve with --backend {EMBEDDED}"
        options.refuse_ignored(context, OWN, "only the embedded engine's server has it", do)
    if not dry_run:
        options.refuse_ignored(context, ("as_json", "show_files"), "only a dry run has it", "add --dry-run")


def _plain_because(deployment: Deployment, backend: ServerBackend) -> str | None:
    # why it serves without speculation; None: it speculates, or neither was asked for
    from dflash_serve.adapter.launch import drafting_argument

    if drafting_argument(backend, deployment) is not None:
        return None
    if deployment.speculation.width == "off":
        return None if deployment.drafter is None else DRAFTER_UNUSED
    return WITHOUT_DRAFTER if deployment.drafter is None else None


def _problems(launch: Launch, *, quiet: bool) -> list[Problem]:
    """All problems of a start here; to find them may take long, as where the bundled target is converted first."""
    from dflash_serve.common.progress import doing, shown

    deployment = launch.deployment
    log = None if deployment.serving.log_format == "text" else lambda line: _remark(line, deployment)
    with shown(quiet=quiet, log=log), doing("checking the deployment"):
        return launch.problems_of_start


def _require_startable(launch: Launch, problems: Sequence[Problem], host: str, port: int, backend_name: str) -> None:
    from dflash_serve.adapter.launch import HINT
    from dflash_serve.common.processes import require_program

    raise_problems(problems, hint=HINT)
    require_program(launch.command(_dry_folder(), host=host, port=port).argv, backend_name)


def _remark(text: str, deployment: Deployment) -> None:
    print(remark(text, deployment.serving.log_format), file=sys.stderr)


def prepared(launch: Launch, folder: Path | None) -> Path:
    """The folder with the files that the engine reads.

    Raises:
        UserError: it cannot be written, or the backend refuses the deployment.
    """
    try:
        folder = folder or temporary_folder()
        launch.prepare(folder)
    except BaseException as error:
        if folder is not None:
            remove_temporary(folder)
        if not isinstance(error, OSError):
            raise
        do = "free some space, or name another --folder"
        where = str(folder or tempfile.gettempdir())
        raise UserError(f"cannot be written ({error.strerror})", where=where, do=do) from None
    return folder


def _dry_folder() -> Path:
    return Path(tempfile.gettempdir(), "dflash-serve")


def tell_choices(launch: Launch) -> None:
    """Prints on stderr the choices and the notes of a launch."""
    form = launch.deployment.serving.log_format
    said = [f"{choice.key} = {choice.value}: {choice.why}" for choice in launch.choices]
    for text in (*said, *(f"note: {note}" for note in launch.notes)):
        print(remark(text, form), file=sys.stderr)
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


@dataclass(frozen=True)
class ShownLaunch:
    """A launch as a dry run shows it; nothing is written or started."""

    backend: str
    deployment: Deployment
    folder: Path
    problems: Sequence[Problem]
    command: Command | None = None  # None = the problems prevent it, as `files`
    files: Sequence[PreparedFile] | None = None
    choices: Sequence[Choice] = ()
    notes: Sequence[str] = ()
    given: Sequence[GivenValue] = ()


def shown_launch(
    backend: str, launch: Launch, folder: Path, host: str, port: int, given: Sequence[GivenValue] = ()
) -> ShownLaunch:
    """The launch as far as it can be shown; `given` does not come from the deployment's file."""
    from dflash_serve.common.processes import missing_program

    shown = ShownLaunch(backend, launch.deployment, folder, launch.problems_of_start, given=given)
    try:
        command = launch.command(folder, host=host, port=port)
        shown = replace(shown, command=command)
        files, choices, notes = launch.files(folder), launch.choices, [*launch.notes]
        if missing := missing_program(command.argv):
            notes.append(
                f"{missing} is not installed here, so its own checks of the model and of arguments were not made"
            )
        return replace(shown, files=files, choices=choices, notes=notes)
    except UserError as error:  # most often a problem has said it already
        return replace(shown, problems=shown.problems or [error.problem()])


def show_launch(shown: ShownLaunch, *, as_json: bool, quiet: bool, files: bool) -> None:
    """Prints problems, command, files and choices of a launch.

    Everything is text or JSON; with `quiet` it is the command alone, and problems go to stderr.

    Raises:
        typer.Exit: with code 2, where there are problems.
    """
    if as_json:
        typer.echo(json.dumps(_as_json(shown), indent=2))
    elif quiet:
        for line in listed(shown.problems):
            typer.echo(f"problem: {line}", err=True)
        if shown.command is not None and not shown.problems:
            settings = [f"{name}={shlex.quote(value)}" for name, value in shown.command.env.items()]
            typer.echo(" ".join([*settings, shlex.join(shown.command.argv)]))
    else:
        typer.echo("\n".join(_lines(shown, files=files)))
    if shown.problems:
        raise typer.Exit(2)


def _as_json(shown: ShownLaunch) -> dict[str, object]:
    return {
        "backend": shown.backend,
        "command": list(shown.command.argv) if shown.command else None,
        "environment": dict(shown.command.env) if shown.command else None,
        "folder": str(shown.folder),
        "files": [asdict(file) for file in shown.files or ()],  # one without text is weights or a secret
        "problems": [asdict(problem) for problem in shown.problems],
        "given": [each._asdict() for each in shown.given],
        "chosen": [asdict(choice) for choice in shown.choices],
        "notes": list(shown.notes),
        "deployment": shown.deployment.model_dump(mode="json", exclude_defaults=True),
    }


def _lines(shown: ShownLaunch, *, files: bool) -> Iterator[str]:
    if not shown.problems:
        yield f"{shown.backend}: no problem found"
    else:
        yield "problems"
        yield from (broken(f"{INDENT}{line}") for line in listed(shown.problems))
    if shown.given:
        yield "given on the command line or by environment variables"
        yield from (f"{INDENT}{each.line}" for each in shown.given)
    if shown.command is not None:
        yield "environment" if shown.command.env else "environment: nothing is added"
        yield from (f"{INDENT}{name}={value}" for name, value in shown.command.env.items())
        yield "command"
        yield f"{INDENT}{shlex.join(shown.command.argv)}"
    if shown.files is None:
        return
    yield broken(f"files in {shown.folder}" + ("" if files else " (--show-files shows what stands in them)"))
    for file in shown.files:
        yield broken(f"{INDENT}{file.name}: {file.about}")
        if files and file.text is not None:
            yield from (f"{INDENT}{INDENT}| {line}" for line in file.text.splitlines())
    yield "chosen, where the deployment leaves it open"
    yield from (broken(f"{INDENT}{choice.key} = {choice.value}: {choice.why}") for choice in shown.choices)
    if shown.notes:
        yield "notes"
        yield from (broken(f"{INDENT}{note}") for note in shown.notes)
