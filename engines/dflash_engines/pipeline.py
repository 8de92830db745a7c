"""Runs the steps of a build in order and keeps every output under the key of what made it, so that a build can resume.

OUTPUT/steps/<name>-<key> holds a step's files and its manifest.json (`common.store.ResultFolders`). OUTPUT/<name> is a
link to the current one, and OUTPUT/manifest.json names all.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Literal

from dflash_serve.checkpoint.files import MANIFEST, Manifest, checksum_problems, file_entries, read_manifest
from dflash_serve.common.documents import read_json
from dflash_serve.common.extras import import_extra
from dflash_serve.common.files import write_whole
from dflash_serve.common.provenance import versions
from dflash_serve.common.store import ResultFolders, digest
from dflash_serve.errors import Problem, UserError

Measured = dict[str, object]  # measurements of a step's output, for its manifest


@dataclass(frozen=True)
class Source:
    """A folder, or a file of prompts, that the build reads."""

    folder: Path
    digest: str
    description: dict[str, object]  # for the manifest: the name that was asked for and the files that it led to


@dataclass(frozen=True)
class Work:
    """The folders of a running step."""

    folder: Path  # empty; becomes its output when the step returns
    inputs: Mapping[str, Path]  # folders of its sources and of the steps it needs
    say: Callable[[str], None]  # shows a line of progress


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silences ModelOpt and transformers inside, errors excepted; a step reports through `Work.say`."""
    logs = import_extra("engines", "transformers").utils.logging
    logs.disable_progress_bar()
    logs.set_verbosity_error()
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        warnings.catch_warnings(action="ignore"),
    ):
        yield


@dataclass(frozen=True)
class Step:
    """A pure function of its inputs, its parameters and the tools' versions."""

    name: str
    run: Callable[[Work], Measured]
    needs: tuple[str, ...]  # sources and steps
    parameters: Mapping[str, object] = field(default_factory=dict)
    tools: tuple[str, ...] = ()  # packages whose version matters to the output
    revision: int = 1  # counted up when the code of the step changes what it writes
    about: str = ""  # a line for the plan

    def tool_versions(self) -> dict[str, str]:
        """Package -> version; `absent` if it is not installed."""
        found = versions(*self.tools) if self.tools else {}
        return {tool: found.get(tool, "absent") for tool in self.tools}

    def key(self, inputs: Mapping[str, str]) -> str:
        """The digest of all that determines the output; `inputs` are digests by name."""
        return digest([self.name, self.revision, dict(self.parameters), self.tool_versions(), dict(inputs)])


@dataclass(frozen=True)
class Done:
    """A step that has run, and its output."""

    step: Step
    folder: Path
    manifest: Manifest
    state: Literal["built", "there already"]


def run(
    steps: Sequence[Step],
    sources: Mapping[str, Source],
    output: Path,
    *,
    on_progress: Callable[[Step, str], None] = lambda step, line: None,
    on_done: Callable[[Done], None] = lambda done: None,
) -> list[Done]:
    """Runs every step whose output is not there yet, and writes OUTPUT/manifest.json.

    Args:
        on_progress: shows the running step with a line of progress ("" at its beginning).
        on_done: shows a finished step.

    Raises:
        UserError: a step cannot do its work; what was done before it stays.
    """
    store, finished = ResultFolders(output / "steps"), list[Done]()
    folders = {name: source.folder for name, source in sources.items()}
    digests = {name: source.digest for name, source in sources.items()}
    output.mkdir(parents=True, exist_ok=True)
    with _alone(output, lambda line: on_progress(steps[0], line)):
        store.remove_unfinished()
        for step in steps:
            on_progress(step, "")
            inputs = {name: folders[name] for name in step.needs}
            keys = {name: digests[name] for name in step.needs}
            done = _run_step(step, inputs, keys, store, partial(on_progress, step))
            folders[step.name], digests[step.name] = done.folder, done.manifest.digest
            _point(output / step.name, done.folder)
            finished.append(done)
            on_done(done)
        summary = {
            "sources": {name: source.description for name, source in sources.items()},
            "steps": {
                one.step.name: {"folder": str(one.folder.relative_to(output)), **one.manifest.model_dump(mode="json")}
                for one in finished
            },
        }
        write_whole(output / MANIFEST, json.dumps(summary, indent=2) + "\n")
    return finished


@contextlib.contextmanager
def _alone(output: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Waits until no other build writes this folder, on any node, and keeps others out meanwhile.

    The lock ends with the process that holds it, so a killed build leaves none.

    Raises:
        UserError: the file system has no locks.
    """
    with (output / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another build writes {output}; waiting for its end")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            do = "mount it with locks (NFS 4, Lustre's -o flock), or build on another"
            raise UserError(f"this file system has no locks ({error.strerror})", where=str(output), do=do) from None
        yield


def _run_step(
    step: Step, inputs: Mapping[str, Path], digests: Mapping[str, str], store: ResultFolders, say: Callable[[str], None]
) -> Done:
    key = step.key(digests)
    folder = store.get(step.name, key)
    if folder is not None and not checksum_problems(folder):
        manifest = read_manifest(folder)
        if manifest is not None and manifest.key == key:
            return Done(step, folder, manifest, "there already")
    with store.put(step.name, key) as scratch:
        start = perf_counter()
        measured = step.run(Work(scratch, inputs, say))
        manifest = Manifest(
            step=step.name,
            key=key,
            inputs=dict(digests),
            parameters=json.loads(json.dumps(dict(step.parameters), default=str)),
            tools=step.tool_versions(),
            seconds=round(perf_counter() - start, 3),
            measured=measured,
            files=file_entries(scratch),
        )
        (scratch / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return Done(step, store.path(step.name, key), manifest, "built")


def _point(link: Path, folder: Path) -> None:
    # Replaced in one move: the link is never missing.
    scratch = link.with_name(f".{link.name}.new")
    scratch.unlink(missing_ok=True)
    scratch.symlink_to(folder.relative_to(link.parent))
    scratch.replace(link)


def verify_output(output: Path) -> list[Problem]:
    """A problem for every file of a finished build that is not what it was built as.

    Raises:
        UserError: this is no finished output of a build.
    """
    try:
        summary = read_json(output / MANIFEST)
        folders = {name: (output / entry["folder"], entry["key"]) for name, entry in summary["steps"].items()}
    except (UserError, ValueError, KeyError, TypeError):
        raise UserError("no manifest of a finished build", where=str(output), do="build it first") from None
    problems = []
    for name, (folder, key) in folders.items():
        manifest = read_manifest(folder)
        if manifest is None or manifest.key != key:
            what = f"the output of {name} is not the one that was built"
            problems.append(Problem(what, str(folder), "build it again"))
        else:
            problems += checksum_problems(folder)
    return problems
