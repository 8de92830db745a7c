"""Steps of a build, and running them in order: every output is kept by the digest of what made it.

So a build that was stopped goes on where it was. OUTPUT/steps/<name>-<key> holds a step's files and its manifest.json;
the folder gets its name when the step is done, so a name means a whole output. OUTPUT/<name> points at the current one,
and OUTPUT/manifest.json names all.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Literal

from dflash_serve.checkpoint.files import MANIFEST, Manifest, file_entries, read_manifest, verify
from dflash_serve.common.extras import import_extra
from dflash_serve.common.files import whole_folder, write_whole
from dflash_serve.common.provenance import versions
from dflash_serve.errors import Problem, UserError

Measured = dict[str, object]
"""What a step found out about its output, for its manifest."""
State = Literal["built", "there already"]


@dataclass(frozen=True)
class Source:
    """A folder, or a file of prompts, that the build reads."""

    folder: Path
    digest: str
    description: dict[str, object]
    """What the manifest says of it: what was asked for, and what it was."""


@dataclass(frozen=True)
class Work:
    """What a running step has at hand."""

    folder: Path
    """Empty; becomes its output when the step returns."""
    inputs: Mapping[str, Path]
    """Folders of its sources and of the steps it needs."""
    say: Callable[[str], None]
    """Shows a line on what it is at."""


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silences ModelOpt, transformers and the exporter inside, but for errors: a step speaks by `Work.say`."""
    logs = import_extra("engines", "transformers").utils.logging
    logs.disable_progress_bar()
    logs.set_verbosity_error()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
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
    needs: tuple[str, ...]
    """Sources and steps."""
    parameters: Mapping[str, object] = field(default_factory=dict)
    tools: tuple[str, ...] = ()
    """Packages whose version matters to the output."""
    revision: int = 1
    """Counted up when the code of the step changes what it writes."""
    about: str = ""
    """A line for the plan."""

    def tool_versions(self) -> dict[str, str]:
        """Package -> version; `absent` where it is not installed."""
        found = versions(*self.tools) if self.tools else {}
        return {tool: found.get(tool, "absent") for tool in self.tools}

    def key(self, inputs: Mapping[str, str]) -> str:
        """The digest of all that determines the output; `inputs` are digests by name."""
        parts = [self.name, self.revision, dict(self.parameters), self.tool_versions(), dict(inputs)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class Done:
    """A step that has run, and its output."""

    step: Step
    folder: Path
    manifest: Manifest
    state: State


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
        on_progress: shows which step runs, and a line on what it is at ("" at its beginning).
        on_done: shows what a step has made.

    Raises:
        UserError: a step cannot do its work; what was done before it stays.
    """
    store = output / "steps"
    store.mkdir(parents=True, exist_ok=True)
    with _alone(output, lambda line: on_progress(steps[0], line)):
        for unfinished in filter(Path.is_dir, store.glob(".*")):
            shutil.rmtree(unfinished)
        return _run_all(steps, sources, output, on_progress, on_done)


@contextlib.contextmanager
def _alone(output: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Waits until no other build writes this folder, on whichever node it runs, and keeps others out meanwhile.

    The lock goes with the process that holds it, so a build that was killed leaves none.

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


def _run_all(
    steps: Sequence[Step],
    sources: Mapping[str, Source],
    output: Path,
    on_progress: Callable[[Step, str], None],
    on_done: Callable[[Done], None],
) -> list[Done]:
    store = output / "steps"
    folders = {name: source.folder for name, source in sources.items()}
    digests = {name: source.digest for name, source in sources.items()}
    finished: list[Done] = []
    for step in steps:
        on_progress(step, "")
        inputs, keys = {name: folders[name] for name in step.needs}, {name: digests[name] for name in step.needs}
        done = _run_step(step, inputs, keys, store, partial(on_progress, step))
        folders[step.name], digests[step.name] = done.folder, done.manifest.digest
        _point(output / step.name, done.folder)
        finished.append(done)
        on_done(done)
    _write_summary(output, finished, sources)
    return finished


def _run_step(
    step: Step, inputs: Mapping[str, Path], digests: Mapping[str, str], store: Path, say: Callable[[str], None]
) -> Done:
    key = step.key(digests)
    folder = store / f"{step.name}-{key[:12]}"
    if folder.is_dir() and not verify(folder):
        manifest = read_manifest(folder)
        if manifest is not None and manifest.key == key:
            return Done(step, folder, manifest, "there already")
    with whole_folder(folder) as scratch:
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
    return Done(step, folder, manifest, "built")


def _point(link: Path, folder: Path) -> None:
    """Makes `link` a relative link to `folder`, replaced in one move."""
    scratch = link.with_name(f".{link.name}.new")
    scratch.unlink(missing_ok=True)
    scratch.symlink_to(folder.relative_to(link.parent))
    scratch.replace(link)


def _write_summary(output: Path, finished: Sequence[Done], sources: Mapping[str, Source]) -> None:
    summary = {
        "sources": {name: source.description for name, source in sources.items()},
        "steps": {
            done.step.name: {"folder": str(done.folder.relative_to(output)), **done.manifest.model_dump(mode="json")}
            for done in finished
        },
    }
    write_whole(output / MANIFEST, json.dumps(summary, indent=2) + "\n")


def verify_output(output: Path) -> list[Problem]:
    """A problem for every file of a finished build that is not what it was built as.

    Raises:
        UserError: this is no finished output of a build.
    """
    try:
        summary = json.loads((output / MANIFEST).read_text(encoding="utf-8"))
        folders = {name: (output / entry["folder"], entry["key"]) for name, entry in summary["steps"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError("no manifest of a finished build", where=str(output), do="build it first") from None
    problems = []
    for name, (folder, key) in folders.items():
        manifest = read_manifest(folder)
        if manifest is None or manifest.key != key:
            what = f"the output of {name} is not the one that was built"
            problems.append(Problem(what, str(folder), "build it again"))
        else:
            problems += verify(folder)
    return problems
