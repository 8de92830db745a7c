"""What `serve` would do, all of it, without doing it: `--dry-run`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from dflash_serve.backend import Command, ContractedBackend, ServerBackend
from dflash_serve.common.json_log import remark
from dflash_serve.deployment import Deployment
from dflash_serve.errors import Problem, UserError
from dflash_serve.preview import Preview, PreviewingBackend

INDENT = "  "


@dataclass(frozen=True)
class Rehearsal:
    """A launch before it happens."""

    backend: str
    deployment: Deployment
    folder: Path
    problems: list[Problem]
    command: Command | None
    """None = a problem leaves no command."""
    preview: Preview | None
    """None = this backend cannot tell, or a problem leaves nothing to tell."""
    contract: tuple[str, ...] = ()
    """Each foreign name that the backend's plug-in relies on, and whether it holds in the installed release."""

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
        """All of it; a file without text is weights or a secret."""
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
            "contract": list(self.contract),
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
        if self.contract:
            yield f"what the plug-in relies on in {self.backend}"
            yield from (f"{INDENT}{line}" for line in self.contract)


def rehearse(backend: ServerBackend, deployment: Deployment, folder: Path, *, host: str, port: int) -> Rehearsal:
    """Everything that is known without writing or starting anything.

    Raises:
        UserError: target or drafter cannot be found or read at all.
    """
    problems = backend.check(deployment)
    command, told = None, None
    try:
        command = backend.command(deployment, folder, host=host, port=port)
        told = backend.preview(deployment, folder) if isinstance(backend, PreviewingBackend) else None
    except UserError as error:  # most often what a problem has said already
        if not problems:
            problems = [Problem(error.what, error.where, error.do)]
    contract = tuple(backend.contract()) if isinstance(backend, ContractedBackend) else ()
    return Rehearsal(backend.name, deployment, folder, problems, command, told, contract)


def in_shell(command: Command) -> str:
    """The command as one line for a POSIX shell, its own environment first."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in command.env.items()]
    return " ".join([*settings, shlex.join(command.argv)])


def tell_choices(backend: ServerBackend, deployment: Deployment, *, quiet: bool) -> None:
    """On stderr: numbers that the deployment leaves open, and what this backend does otherwise."""
    if quiet or not isinstance(backend, PreviewingBackend):
        return
    told = backend.preview(deployment, Path())
    said = [f"{choice.key} = {choice.value}: {choice.why}" for choice in told.choices]
    for text in (*said, *(f"note: {note}" for note in told.notes)):
        print(remark(text, deployment.serving.log_format), file=sys.stderr)
    sys.stderr.flush()
