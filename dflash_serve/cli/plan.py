"""`dflash-serve plan`: split, width and batch for given GPUs, with expected figures, before anything runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from dflash_serve.adapter.registry import server_backend
from dflash_serve.cli import options
from dflash_serve.cli.options import name_drafter
from dflash_serve.common.progress import doing, shown
from dflash_serve.common.settings import overlay
from dflash_serve.common.terminal import say
from dflash_serve.deployment.gpus import GPUS

if TYPE_CHECKING:
    from dflash_serve.planning.methods import PricedMethod
    from dflash_serve.planning.plan import Plan

TOP = 12  # Lines of a front in the terminal, at most
UNCUT = 200  # Columns of output that no terminal shows: no table of a plan is as wide
Gpu = Annotated[str | None, Option(help=f"Kind of GPU: {', '.join(GPUS)}.")]
Count = Annotated[int | None, Option(help="Number of GPUs. [default: hardware.count, or 1]", min=1)]
Tensor = Annotated[int | None, Option(help="GPUs that share every layer. [default: the best]", min=1)]
Expert = Annotated[int | None, Option(help="GPUs that share out the experts. [default: the best]", min=1)]
Pair = Annotated[bool, Option("--pair", help="Write prefill and decode servers, as many of each as the load wants.")]
Isl = Annotated[int, Option(help="Mean prompt, in tokens.", min=1)]
Osl = Annotated[int, Option(help="Mean answer, in tokens.", min=2)]
SloInteractivity = Annotated[float | None, Option(help="Tokens/s/user that must be kept.", min=0)]
SloTtft = Annotated[float | None, Option(help="Milliseconds to the first token that must be kept.", min=0)]
Length = Annotated[float | None, Option(help="Tokens gained a step, the bonus token counted.")]
Survival = Annotated[Path | None, Option(help="Report of evaluate or bench: survival measured.")]
Task = Annotated[str | None, Option(help="Task: of --survival's report, else as published (gsm8k, mt-bench).")]
ConstantsOf = Annotated[str | None, Option("--constants", help="Engine constants: a known set, or a JSON file.")]
Calibrate = Annotated[Path | None, Option(help="bench.json or certificate.json: fit the engine constants to it.")]
Methods = Annotated[
    str | None, Option(help="Price methods beside each other: off,dflash,dflash2,dspark,eagle3,mtp, or some of them.")
]
Output = Annotated[Path, Option(help="Folder for the plan.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace the plan in --output.")]


def plan(
    context: typer.Context,
    deployment: options.DeploymentFile = None,
    target: options.Target = None,
    drafter: options.Drafter = None,
    backend: options.Backend = "sglang",
    gpu: Gpu = None,
    count: Count = None,
    tensor: Tensor = None,
    expert: Expert = None,
    pair: Pair = False,
    block_size: options.BlockSize = None,
    isl: Isl = 1024,
    osl: Osl = 1024,
    slo_interactivity: SloInteractivity = None,
    slo_ttft: SloTtft = None,
    acceptance_length: Length = None,
    survival: Survival = None,
    task: Task = None,
    constants: ConstantsOf = None,
    calibrate: Calibrate = None,
    methods: Methods = None,
    output: Output = Path("plan"),
    overwrite: Overwrite = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Say which split, width and batch to run on which GPUs, and what to expect. Nothing is run."""
    options.require_target("plan", deployment, target)
    chosen = server_backend(backend)
    from dflash_serve.common.files import require_writable
    from dflash_serve.planning.files import JSON, require_free, write_plan
    from dflash_serve.planning.methods import compared, methods_named
    from dflash_serve.planning.search import make_plan
    from dflash_serve.planning.settings import PlanSettings

    if not overwrite:
        require_free(output)
    named = methods_named(methods) if methods is not None else []
    settings = options.settings_of(PlanSettings, context.params)
    flags = overlay(options.deployment_flags(context.params), settings.flags())
    described = options.load_described(deployment, flags, quiet=quiet)
    with shown(quiet=quiet), doing("planning"):
        answer = make_plan(settings.question(name_drafter(described, chosen, quiet=quiet)))
        others = compared(answer, named, task)
    require_writable(output)
    files = write_plan(answer, output, others)
    if as_json:
        typer.echo((output / JSON).read_text(encoding="utf-8"), nl=False)
        return
    for line in answer.verdict():
        say(line)
    if not quiet:
        _tell(answer, output, others, files)


def _tell(answer: Plan, output: Path, others: list[PricedMethod], files: list[Path]) -> None:
    from rich.console import Console

    from dflash_serve.planning.files import methods_steps

    # Piped, a table is as wide as it wants to be: rich would cut its columns at 80.
    console = Console(width=None if sys.stdout.isatty() else UNCUT)
    console.print(_table(answer))
    if others:
        console.print(_methods(others))
    for line in _sources(others):
        say(line)
    for line in answer.question.calibration:
        say(f"calibrated: {line}")
    for caution in answer.cautions():
        say(f"note: {caution}")
    for step in (*answer.next_steps(output), *methods_steps(answer, output, others)):
        typer.echo(f"next: {step}")  # a command is one line, to be copied
    say(f"written: {', '.join(str(file) for file in files)}")


def _table(answer: Plan) -> Any:
    from rich import box
    from rich.table import Table

    # Units in a line of their own: the table fits 60 columns, and no head is cut.
    heads = ("", "split", "batch", "width", "tokens/s\nper GPU", "tokens/s\nper user", "TTFT\nms")
    table = Table(*heads, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[2:]:
        column.justify = "right"
    for name, points in answer.fronts().items():
        every = max(1, -(-len(points) // TOP))
        shown = [point for place, point in enumerate(points) if place % every == 0 or point == answer.chosen]
        for place, point in enumerate(shown):
            figures = (f"{point.throughput:,.0f}", f"{point.interactivity:,.0f}", f"{point.first_token_ms:,.0f}")
            chosen = point == answer.chosen
            label = name if place == 0 else ""
            style = "bold" if chosen else None
            table.add_row(label, str(point.split), str(point.batch), str(point.width), *figures, style=style)
    return table


def _methods(methods: list[PricedMethod]) -> Any:
    from rich import box
    from rich.table import Table

    heads = ("", "width", "\N{GREEK SMALL LETTER TAU}", "batch", "tokens/s\nper GPU", "tokens/s\nper user", "times off")
    table = Table(*heads, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for method in methods:
        for place, (point, gain) in enumerate(zip(method.points, method.gains, strict=True)):
            label = (method.name, str(point.width), f"{point.acceptance_length:.2f}") if place == 0 else ("", "", "")
            figures = (f"{point.throughput:,.0f}", f"{point.interactivity:,.0f}", f"{gain:.2f}")
            table.add_row(*label, str(point.batch), *figures)
    return table


def _sources(methods: list[PricedMethod]) -> list[str]:
    told = [f"{method.name}: {method.acceptance.source}" for method in methods if method.acceptance is not None]
    return [*told, *(f"{method.name}: not priced: {method.why_not}" for method in methods if method.why_not)]
