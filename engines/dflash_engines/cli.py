"""`dflash-serve build`: from a recipe to quantised checkpoints, each checked. Found by its entry point."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_serve.errors import UserError

from .pipeline import Done, Source, Step, run, verify_output
from .recipe import Recipe, find_recipe, load_recipe
from .steps import find_sources, make_steps, write_deployments

if TYPE_CHECKING:
    from rich.console import Console


def build(
    recipe: Annotated[
        Path,
        typer.Argument(metavar="RECIPE", help="YAML file of what to serve and what to build, or a recipe's name."),
    ],
    output: Annotated[Path | None, typer.Option(help="Folder to build in; builds/<recipe> unless named.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the steps and what each needs, and build nothing.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Compare every file of a finished build with its manifest; exit code 1 if one differs."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print the result alone: no progress, no remarks.")
    ] = False,
) -> None:
    """Build the quantised checkpoints that a recipe names; a build that was stopped goes on."""
    from rich.console import Console

    console = Console(soft_wrap=True, quiet=quiet)
    recipe = find_recipe(recipe)
    folder = (output or Path("builds") / recipe.stem).resolve()
    if verify:
        _verify(folder, as_json, console)
    elif dry_run:
        _list_steps(load_recipe(recipe), as_json, console)
    else:
        _build(load_recipe(recipe), folder, as_json, console)


def _verify(folder: Path, as_json: bool, console: Console) -> None:
    problems = verify_output(folder)
    if as_json:
        typer.echo(json.dumps([asdict(problem) for problem in problems]))
    else:
        for problem in problems:
            console.print(str(problem), markup=False)
        if not problems:
            console.print(f"{folder}: every file is what it was built as", markup=False)
    if problems:
        raise typer.Exit(1)


def _list_steps(recipe: Recipe, as_json: bool, console: Console) -> None:
    from rich.table import Table

    steps = make_steps(recipe)
    if as_json:
        typer.echo(json.dumps([{"step": s.name, "needs": s.needs, "about": s.about} for s in steps]))
        return
    table = Table("step", "after", "what", box=None, pad_edge=False)
    for step in steps:
        table.add_row(step.name, ", ".join(step.needs), step.about)
    console.print(table)
    if recipe.build.acceptance and recipe.build.acceptance.prompts is None:
        console.print("acceptance is left out: the recipe names no prompts for it", markup=False)


def _build(recipe: Recipe, folder: Path, as_json: bool, console: Console) -> None:
    steps = make_steps(recipe)
    _require_tools(steps)
    sources = find_sources(recipe)
    if as_json:
        run(steps, sources, folder)
        write_deployments(recipe, sources, folder)
        typer.echo((folder / "manifest.json").read_text(encoding="utf-8"))
        return
    finished = _run_and_show(steps, sources, folder, console)
    for path in write_deployments(recipe, sources, folder):
        console.print(f"to serve it: {path}", markup=False)
    made = [done for done in finished if done.state == "built"]
    seconds = sum(done.manifest.seconds for done in made)
    line = f"{folder}: {len(made)} steps built in {seconds:.0f} s, {len(finished) - len(made)} there already"
    console.print(line, markup=False)


def _run_and_show(
    steps: Sequence[Step], sources: Mapping[str, Source], folder: Path, console: Console
) -> Sequence[Done]:
    status = console.status("")

    def show_progress(step: Step, line: str) -> None:
        status.update(f"{step.name}: {line}" if line else step.name)

    def show_done(done: Done) -> None:
        size = sum(entry.size for entry in done.manifest.files.values()) / 2**20
        state = f"{done.manifest.seconds:.1f} s" if done.state == "built" else done.state
        said = "; ".join([f"{state}, {size:.1f} MiB", *_findings(done.manifest.measured)])
        console.print(f"{done.step.name:<20} {said}", markup=False, highlight=False)

    with status:
        return run(steps, sources, folder, on_progress=show_progress, on_done=show_done)


def _require_tools(steps: Sequence[Step]) -> None:
    # Checked first: the steps before the one that needs a tool can take hours.
    absent = {
        tool: step.name for step in steps for tool, version in step.tool_versions().items() if version == "absent"
    }
    if absent:
        what = ", ".join(f"{tool} (step {name})" for tool, name in sorted(absent.items()))
        do = "pip install torch==2.13.0 && pip install 'dflash-serve[engines]'"
        raise UserError(f"not installed: {what}", where="build", do=do)


def _findings(measured: Mapping[str, object]) -> Iterator[str]:
    if "worst_error" in measured:
        yield f"worst error {measured['worst_error']:.3f} ({measured['worst_tensor']})"
    errors = measured.get("relative_error")
    if isinstance(errors, dict):
        yield "relative error " + ", ".join(f"{name} {error:.4f}" for name, error in errors.items())
    for name, entry in measured.items():
        if isinstance(entry, dict) and "acceptance_length" in entry:
            share = ""
            if "of_bf16" in entry:
                least, most = entry["interval"]
                share = f" ({entry['of_bf16']:.3f} of bf16, 95 % between {least:.3f} and {most:.3f})"
            yield f"{name} {entry['acceptance_length']:.3f}{share}"
