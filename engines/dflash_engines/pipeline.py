"""Runs steps in order, keeps every output by the digest of what made it, and goes on where it was stopped.

OUTPUT/steps/<name>-<key> holds a step's files and its manifest.json, which is written last; the folder gets its name
when the step is done, so a name means a whole output. OUTPUT/<name> points at the current one, and OUTPUT/manifest.json
names all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Literal

from dflash_serve.checkpoint.manifest import NAME, Manifest, file_entries, read_manifest, verify
from dflash_serve.errors import Problem, UserError

from .sources import Source
from .step import Step, Work

State = Literal["built", "there already"]
SCRATCH = ".unfinished-"


@dataclass(frozen=True)
class Done:
    """A step and its output."""

    step: Step
    folder: Path
    manifest: Manifest
    state: State


def run(
    steps: Sequence[Step],
    sources: Mapping[str, Source],
    output: Path,
    *,
    begins: Callable[[Step], None] = lambda step: None,
    ends: Callable[[Done], None] = lambda done: None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Done]:
    """Runs every step whose output is not there yet, and writes OUTPUT/manifest.json.

    Raises:
        UserError: a step cannot do its work; what was done before it stays.
    """
    store = output / "steps"
    store.mkdir(parents=True, exist_ok=True)
    for left in store.glob(f"{SCRATCH}*"):
        shutil.rmtree(left)
    folders = {name: source.folder for name, source in sources.items()}
    digests = {name: source.digest for name, source in sources.items()}
    finished: list[Done] = []
    for step in steps:
        begins(step)
        done = _run_step(step, {n: folders[n] for n in step.needs}, {n: digests[n] for n in step.needs}, store, say)
        folders[step.name], digests[step.name] = done.folder, done.manifest.digest
        _point(output / step.name, done.folder)
        finished.append(done)
        ends(done)
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
    shutil.rmtree(folder, ignore_errors=True)
    scratch = store / f"{SCRATCH}{step.name}-{key[:12]}"
    scratch.mkdir()
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
    (scratch / NAME).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    scratch.rename(folder)
    return Done(step, folder, manifest, "built")


def _point(link: Path, folder: Path) -> None:
    """A relative link, replaced in one move."""
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
    scratch = output / f".{NAME}.new"
    scratch.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    scratch.replace(output / NAME)


def verify_output(output: Path) -> list[Problem]:
    """Every file of every step that is not what it was built as.

    Raises:
        UserError: this is no finished output of a build.
    """
    try:
        summary = json.loads((output / NAME).read_text(encoding="utf-8"))
        folders = {name: (output / entry["folder"], entry["key"]) for name, entry in summary["steps"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError("no manifest of a finished build", where=str(output), do="build it first") from None
    problems = []
    for name, (folder, key) in folders.items():
        manifest = read_manifest(folder)
        if manifest is None or manifest.key != key:
            problems.append(
                Problem(f"the output of {name} is not the one that was built", str(folder), "build it again")
            )
        else:
            problems += verify(folder)
    return problems
