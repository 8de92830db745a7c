"""`dflash-serve build`: from a recipe to quantised checkpoints, each checked. Found by its entry point."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

from dflash_serve.adapter.registry import backend, installed
from dflash_serve.adapter.verdicts import serves_format
from dflash_serve.checkpoint.config import weight_bytes
from dflash_serve.checkpoint.files import MANIFEST, file_entries
from dflash_serve.checkpoint.source import drafter_folder, target_folder
from dflash_serve.checkpoint.target import read_target_layout
from dflash_serve.common.extras import import_extra
from dflash_serve.common.files import sha256, write_whole
from dflash_serve.common.progress import doing, shown
from dflash_serve.deployment.description import Deployment, Model
from dflash_serve.errors import UserError
from dflash_serve.planning.pair import read_pair

from .pipeline import Done, Measured, Source, Step, Work, run, verify_output
from .recipe import BuildRecipe, Format, Integers, find_recipe, is_integer, load_recipe

if TYPE_CHECKING:
    from rich.console import Console

MODELOPT = ("nvidia-modelopt", "torch", "transformers")
GB = 1e9
CALIBRATION, ACCEPTANCE = "calibration prompts", "acceptance prompts"
SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model")
"""Files of a model that its digest covers."""


def build(
    recipe: Annotated[
        Path,
        typer.Argument(metavar="RECIPE", help="YAML file of what to serve and what to build, or a recipe's name."),
    ],
    output: Annotated[Path | None, typer.Option(help="Folder to build in; builds/<recipe> unless named.")] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="List the steps, and the disk and memory that they take; build nothing."),
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

    console = Console(soft_wrap=True, quiet=quiet or as_json, markup=False, emoji=False)
    recipe = find_recipe(recipe)
    folder = (output or Path("builds") / recipe.stem).resolve()
    if verify:
        _verify(folder, as_json, console)
    elif dry_run:
        _list_steps(load_recipe(recipe), recipe, as_json, console)
    else:
        _build(load_recipe(recipe), folder, console)
        if as_json:
            typer.echo((folder / MANIFEST).read_text(encoding="utf-8"))


def _verify(folder: Path, as_json: bool, console: Console) -> None:
    problems = verify_output(folder)
    if as_json:
        typer.echo(json.dumps([asdict(problem) for problem in problems]))
    lines = [str(problem) for problem in problems] or [f"{folder}: every file is what it was built as"]
    console.print("\n".join(lines))
    if problems:
        raise typer.Exit(1)


def _list_steps(recipe: BuildRecipe, file: Path, as_json: bool, console: Console) -> None:
    from rich.table import Table

    steps = make_steps(recipe)
    if as_json:
        typer.echo(json.dumps([{"step": s.name, "needs": s.needs, "about": s.about} for s in steps]))
        return
    if not steps:
        console.print(f"nothing to build in {file}", highlight=False)
        return
    table = Table("step", "after", "what", box=None, pad_edge=False)
    for step in steps:
        table.add_row(step.name, ", ".join(step.needs), step.about)
    console.print(table)
    if recipe.build.acceptance and recipe.build.acceptance.prompts is None:
        console.print("acceptance is left out: the recipe names no prompts for it")
    for line in _what_it_takes(recipe, steps):
        console.print(line)


def _what_it_takes(recipe: BuildRecipe, steps: list[Step]) -> Iterator[str]:
    build, target = recipe.build, recipe.deployment.target
    try:
        pair = read_pair(recipe.deployment)
    except UserError as error:
        yield f"disk and memory are not known: {error}"
        return

    def weights(format: str) -> int:
        return read_target_layout(pair.folder, target.model_copy(update={"quantization": format})).weight_bytes

    plain, draft = weights("none"), weight_bytes(pair.drafter)
    ranks = len(build.checkpoints.tensor) * plain if build.checkpoints else 0
    disk = sum(map(weights, build.target)) + ranks + draft * len(build.drafter)
    yield f"disk: about {disk / GB:.2f} GB, with drafters{' and rank files' if ranks else ''} counted as in bf16"
    loaded = any("target" in step.needs for step in steps)
    memory = (loaded * plain + draft) / GB
    yield f"memory: {memory:.2f} GB of weights in bf16, twice that in float32, and what runs on them"
    if any(step.name == "answers" for step in steps):
        given = build.calibration
        asked = f"{given.count} prompts" if given.prompts else "the built-in prompts"
        yield f"time: not known beforehand; `answers` asks {asked} for at most {given.max_tokens} tokens each"


def _build(recipe: BuildRecipe, folder: Path, console: Console) -> None:
    steps = make_steps(recipe)
    # Checked first: the steps before the one that needs a tool can take hours.
    absent = {tool: step.name for step in steps for tool, found in step.tool_versions().items() if found == "absent"}
    if absent:
        what = ", ".join(f"{tool} (step {name})" for tool, name in sorted(absent.items()))
        do = "pip install torch==2.13.0 && pip install 'dflash-serve[engines]'"
        raise UserError(f"not installed: {what}", where="build", do=do)
    sources = find_sources(recipe)

    def show_done(done: Done) -> None:
        size = sum(entry.size for entry in done.manifest.files.values()) / 2**20
        state = f"{done.manifest.seconds:.1f} s" if done.state == "built" else done.state
        said = "; ".join([f"{state}, {size:.1f} MiB", *_findings(done.manifest.measured)])
        if not console.quiet:
            typer.echo(f"{done.step.name:<20} {said}")
        work.advance()

    with shown(quiet=console.quiet), doing("building", len(steps)) as work:

        def show_progress(step: Step, line: str) -> None:
            work.part = f"{step.name}: {line}" if line else step.name

        finished = run(steps, sources, folder, on_progress=show_progress, on_done=show_done)
    for path in write_deployments(recipe, sources, folder):
        console.print(f"to serve it: {path}")
    seconds = [done.manifest.seconds for done in finished if done.state == "built"]
    there = len(finished) - len(seconds)
    console.print(f"{folder}: {len(seconds)} steps built in {sum(seconds):.0f} s, {there} there already")


def _findings(measured: Mapping[str, object]) -> Iterator[str]:
    if "worst_error" in measured:
        yield f"worst error {measured['worst_error']:.3f} ({measured['worst_tensor']})"
    for name, entry in measured.items():
        if isinstance(entry, dict) and "acceptance_length" in entry:
            share = ""
            if "of_bf16" in entry:
                least, most = entry["interval"]
                share = f" ({entry['of_bf16']:.3f} of bf16, 95 % between {least:.3f} and {most:.3f})"
            yield f"{name} {entry['acceptance_length']:.3f}{share}"


def find_sources(recipe: BuildRecipe) -> dict[str, Source]:
    """Target, drafter and prompts, as far as a step needs them, with digests of their contents.

    Raises:
        UserError: one cannot be found, or trtllm-build would not serve the target.
    """
    target, drafter = recipe.deployment.target, recipe.deployment.drafter
    if drafter is None:
        raise UserError("no drafter to build for", where="deployment.drafter", do="name one")
    sources = {"drafter": _model(drafter, drafter_folder(drafter.model, drafter.revision))}
    if any("target" in step.needs for step in make_steps(recipe)):
        folder = target_folder(target.model, target.revision)
        if recipe.build.checkpoints:
            from .trtllm_checkpoint import refuse

            refuse(import_extra("engines", "transformers").AutoConfig.from_pretrained(folder))
        sources["target"] = _model(target, folder)
    for name, given in ((CALIBRATION, recipe.build.calibration), (ACCEPTANCE, recipe.build.acceptance)):
        if given is None or given.prompts is None:
            continue
        if not given.prompts.is_file():
            do = "correct the recipe, or unset its variable"
            raise UserError("no such file of prompts", where=str(given.prompts), do=do)
        digest = sha256(given.prompts)
        sources[name] = Source(given.prompts, digest, {"file": given.prompts.name, "sha256": digest})
    return sources


def _model(model: Model, folder: Path) -> Source:
    files = {name: entry for name, entry in file_entries(folder).items() if name.endswith(SUFFIXES)}
    text = "\n".join(f"{name} {entry.sha256}" for name, entry in files.items())
    description: dict[str, object] = {
        "model": model.model,
        "revision": model.revision,
        "files": {name: entry.model_dump() for name, entry in files.items()},
    }
    return Source(folder, hashlib.sha256(text.encode()).hexdigest(), description)


def make_steps(recipe: BuildRecipe) -> list[Step]:
    """All steps of a recipe, each after those that it needs."""
    return [*_calibration(recipe), *_targets(recipe), *_drafters(recipe)]


def _calibration(recipe: BuildRecipe) -> Iterator[Step]:
    build, deployment = recipe.build, recipe.deployment
    free = build.calibration.free
    if free and (build.target or build.checkpoints):
        raise UserError("a target is calibrated on data", where="build.calibration.free", do="set it to false")
    by_ranges = [format for format in build.drafter if not is_integer(format)]
    if build.target or build.checkpoints or (by_ranges and not free):
        given = build.calibration
        length = deployment.limits.max_model_len
        parameters: dict[str, object] = {"count": given.count, "max_tokens": given.max_tokens, "length": length}
        parameters |= recipe.measured_by("hardware", "engine_args")
        needs = ("target", *([CALIBRATION] if given.prompts else []))
        about = "answers of the target to the calibration prompts"
        if not given.prompts:
            about += ", which are a few built-in ones because the recipe names no file"

        def answers(work: Work) -> Measured:
            from .calibration import answer

            return answer(work, recipe.measured, given)

        yield Step("answers", answers, needs, parameters, ("torch",), about=about)
    if by_ranges:

        def ranges(work: Work) -> Measured:
            from .calibration import drafter_ranges, free_ranges

            return free_ranges(work) if free else drafter_ranges(work)

        needs = ("drafter",) if free else ("target", "drafter", "answers")
        about = "largest activations of the drafter on these answers"
        if free:
            about = "no data is used: every activation range is set to 448, the largest FP8 number"
        yield Step("drafter-ranges", ranges, needs, {"free": free}, ("torch",), 2, about)


def _targets(recipe: BuildRecipe) -> Iterator[Step]:
    build, deployment = recipe.build, recipe.deployment
    for format in build.target:

        def target(work: Work, format: Format = format) -> Measured:
            from .quantize import quantize_target

            return quantize_target(work, format)

        about = f"weights and activations in {format.upper()}, K/V in FP8"
        revision = 3 if format == "fp8" else 2  # NVFP4 is written as before
        yield Step(f"target-{format}", target, ("target", "answers"), {"format": format}, MODELOPT, revision, about)
    if build.checkpoints:
        wanted = build.checkpoints

        def checkpoints(work: Work) -> Measured:
            from .trtllm_checkpoint import write_checkpoints

            return write_checkpoints(work, deployment, wanted)

        parameters = {**wanted.model_dump(mode="json"), "limits": deployment.limits.model_dump(mode="json")}
        about = f"legacy: rank files for trtllm-build at tensor {', '.join(map(str, wanted.tensor))}"
        yield Step("trtllm-checkpoints", checkpoints, ("target", "answers"), parameters, MODELOPT, 2, about)


def _drafters(recipe: BuildRecipe) -> Iterator[Step]:
    build, deployment = recipe.build, recipe.deployment
    for format in build.drafter:

        def drafter(work: Work, format: Format | Integers = format) -> Measured:
            from .quantize import quantize_drafter, round_drafter

            return round_drafter(work, format) if is_integer(format) else quantize_drafter(work, format)

        if is_integer(format):
            about = "in compressed-tensors' layout, from its weights alone"
            yield Step(f"drafter-{format}", drafter, ("drafter",), {"format": format}, ("torch",), 3, about)
        else:
            made_of, about = ("drafter", "drafter-ranges"), "in ModelOpt's layout"
            yield Step(f"drafter-{format}", drafter, made_of, {"format": format}, MODELOPT, 3, about)
    if build.acceptance and build.acceptance.prompts:
        wanted = build.acceptance

        def acceptance(work: Work) -> Measured:
            from .acceptance import measure

            return measure(work, recipe.measured, wanted, build.drafter)

        length = deployment.limits.max_model_len
        measured_on: dict[str, object] = {**wanted.model_dump(exclude={"prompts"}), "length": length}
        measured_on |= recipe.measured_by("speculation", "hardware", "engine_args")
        needs = ("target", "drafter", ACCEPTANCE, *(f"drafter-{format}" for format in build.drafter))
        about = "acceptance of every drafter, compared with bf16; weights and activations are quantised"
        yield Step("acceptance", acceptance, needs, measured_on, ("torch",), 4, about)


def write_deployments(recipe: BuildRecipe, sources: Mapping[str, Source], output: Path) -> list[Path]:
    """Writes a Deployment for the drafter as published and for every quantised one; a bundled target by its folder.

    The quantised drafters stand beside the file, by their relative paths. A comment says which engines load it.
    """
    written, backends = [], [backend(name) for name in installed()]
    for format in ("bf16", *recipe.build.drafter):
        fields = recipe.deployment.model_dump(mode="json", exclude_unset=True)
        if format != "bf16":
            fields["drafter"] = {"model": f"./drafter-{format}", "quantization": format}
        if "target" in sources and "/" not in recipe.deployment.target.model:
            fields["target"]["model"] = str(sources["target"].folder.absolute())
        path = output / f"serve-{format}.yaml"
        text = yaml.safe_dump(Deployment.model_validate(fields).model_dump(mode="json", exclude_unset=True))
        loads = (one for one in backends if format == "bf16" or serves_format(one, format))
        write_whole(path, f"# Engines that load this drafter: {', '.join(one.name for one in loads)}\n{text}")
        written.append(path)
    return written
