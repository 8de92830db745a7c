"""`dflash-serve build`: from a recipe to quantised checkpoints, ONNX and engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from dflash_engines.pipeline import Done
    from dflash_engines.recipe import Recipe
    from dflash_engines.step import Step


def build(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file, such as those of engines/recipes.")],
    output: Annotated[Path | None, typer.Option(help="Folder to build in; default: builds/<recipe>.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the steps and build nothing.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every file of a finished build, and build nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Build what a recipe names; run again after an interruption, it goes on. --verify: exit code 2 on a fault."""
    from rich.console import Console

    from dflash_engines.recipe import load_recipe

    console = Console(soft_wrap=True)
    folder = (output or Path("builds") / recipe.stem).resolve()
    if verify:
        _verify(folder, as_json, console)
        return
    wanted = load_recipe(recipe)
    if dry_run:
        _show_plan(wanted, as_json, console)
        return
    _build(wanted, folder, as_json, console)


def _verify(folder: Path, as_json: bool, console: Console) -> None:
    from dflash_engines.pipeline import verify_output

    problems = verify_output(folder)
    if as_json:
        typer.echo(json.dumps([{"what": p.what, "where": p.where, "do": p.do} for p in problems]))
    else:
        for problem in problems:
            console.print(str(problem), markup=False)
        if not problems:
            console.print(f"{folder}: every file is what it was built as", markup=False)
    if problems:
        raise typer.Exit(2)


def _show_plan(recipe: Recipe, as_json: bool, console: Console) -> None:
    from rich.table import Table

    from dflash_engines.plan import make_steps

    steps = make_steps(recipe)
    if as_json:
        typer.echo(json.dumps([{"step": s.name, "needs": s.needs, "about": s.about} for s in steps]))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("step", "after", "what"):
        table.add_column(column)
    for step in steps:
        table.add_row(step.name, ", ".join(step.needs), step.about)
    console.print(table)
    if recipe.build.acceptance and recipe.build.acceptance.prompts is None:
        console.print("acceptance is left out: the recipe names no prompts for it", markup=False)


def _build(recipe: Recipe, folder: Path, as_json: bool, console: Console) -> None:
    from dflash_engines.pipeline import run
    from dflash_engines.plan import find_sources, make_steps
    from dflash_engines.serving import write_deployments

    steps = make_steps(recipe)
    _require_tools(steps)
    sources = find_sources(recipe)
    status = console.status("")
    current = ""

    def begins(step: Step) -> None:
        nonlocal current
        current = step.name
        status.update(step.name)

    def ends(done: Done) -> None:
        if not as_json:
            console.print(f"{done.step.name:<20} {_line(done)}", markup=False, highlight=False)

    if as_json:
        run(steps, sources, folder)
        write_deployments(recipe, sources, folder)
        typer.echo((folder / "manifest.json").read_text(encoding="utf-8"))
        return
    with status:
        finished = run(
            steps, sources, folder, begins=begins, ends=ends, say=lambda line: status.update(f"{current}: {line}")
        )
    for path in write_deployments(recipe, sources, folder):
        console.print(f"to serve it: {path}", markup=False)
    made = sum(done.state == "built" for done in finished)
    seconds = sum(done.manifest.seconds for done in finished if done.state == "built")
    console.print(
        f"{folder}: {made} steps built in {seconds:.0f} s, {len(finished) - made} there already", markup=False
    )


def _require_tools(steps: list[Step]) -> None:
    """Says what is not installed before hours are spent on the steps that come first."""
    from dflash_serve.errors import UserError

    absent = {
        tool: step.name for step in steps for tool, version in step.tool_versions().items() if version == "absent"
    }
    if absent:
        what = ", ".join(f"{tool} (step {name})" for tool, name in sorted(absent.items()))
        do = "pip install torch==2.13.0 && pip install 'dflash-serve[engines]'"
        raise UserError(f"not installed: {what}", where="build", do=do)


def _line(done: Done) -> str:
    """What a user wants to know of a finished step."""
    measured, known = done.manifest.measured, []
    if "worst_error" in measured:
        known.append(f"worst error {measured['worst_error']:.3f} ({measured['worst_tensor']})")
    errors = measured.get("relative_error")
    if isinstance(errors, dict):
        known.append("relative error " + ", ".join(f"{k} {v:.4f}" for k, v in errors.items()))
    for name, entry in measured.items():
        if isinstance(entry, dict) and "acceptance_length" in entry:
            share = f" ({entry['of_bf16']:.3f} of bf16)" if "of_bf16" in entry else ""
            known.append(f"{name} {entry['acceptance_length']:.3f}{share}")
        elif isinstance(entry, dict) and "not_built" in entry:
            known.append(f"{name} not built: {entry['not_built']}")
    size = sum(entry.size for entry in done.manifest.files.values()) / 2**20
    state = f"{done.manifest.seconds:.1f} s" if done.state == "built" else done.state
    return "; ".join([f"{state}, {size:.1f} MiB", *known])
