"""`dflash-serve evaluate`: τ, survival and speed-up by task, through the real decoding loop, with controls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dflash_serve.backend import Engine, Prompt, embedded_backend
from dflash_serve.cli import options
from dflash_serve.cli.drafters import name_drafter
from dflash_serve.cli.figures import compare_with_plain, number, survival_text, time_run
from dflash_serve.common.extras import need
from dflash_serve.common.provenance import Environment, environment
from dflash_serve.common.settings import Frozen, overlay
from dflash_serve.deployment import Deployment, load_deployment
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from dflash_serve.outputs import Chunk

TASKS = "Task: gsm8k, math500, mbpp, mt-bench (from the hub), humaneval, or NAME=FILE.jsonl; once for each."
Tasks = Annotated[list[str], typer.Option(help=TASKS)]
SPOILT = "Measure with spoilt features, too. [default: yes, but not at --width auto]"
Controls = Annotated[bool | None, typer.Option(help=SPOILT)]
TIMED = "How many prompts of a task to time alone, with and without speculation in turns."
Speed = Annotated[int, typer.Option(help=TIMED, min=0)]

AT_ONCE = 16  # Requests at once by default
AS_IT_IS = "as it is"  # The drafter with its own features, in contrast to the controls


class TaskFigures(Frozen):
    """One task under one control or none."""

    prompts: int
    steps: float | None  # Steps without speculation included; τ and survival are over those that speculated
    tokens: float | None
    acceptance_length: float | None
    survival: list[float | None]  # Survival of slots 1..B-1
    speed_up: float | None = None  # Tokens/s by those without speculation, one prompt at a time; None = not timed


class EvaluationReport(Frozen):
    """Figures of all tasks at one width."""

    target: str
    drafter: str
    width: int | Literal["auto"]  # Slots verified in a step; auto = chosen by the engine in each step
    max_tokens: int
    temperature: float
    dtype: str
    environment: Environment
    tasks: dict[str, dict[str, TaskFigures]]  # Task -> `AS_IT_IS` or the control's name -> figures


def evaluate(
    context: typer.Context,
    task: Tasks,
    deployment: options.DeploymentFile = None,
    target: options.Target = None,
    drafter: options.Drafter = None,
    num_prompts: Annotated[int, typer.Option(help=options.NUM_PROMPTS, min=1)] = 20,
    max_tokens: Annotated[int, typer.Option(help=options.MAX_TOKENS, min=2)] = 128,
    width: Annotated[str | None, typer.Option(help=f"{options.WIDTH} [default: the whole block]")] = None,
    temperature: options.Temperature = 0.0,
    max_batch_size: options.MaxBatchSize = None,
    controls: Controls = None,
    speed: Speed = 4,
    output: Annotated[Path | None, typer.Option(help=options.REPORT)] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure a drafter task by task: the bundled pair, that of a deployment, or a named one."""
    need("torch", "safetensors", "torch", "transformers")
    from dflash_serve.prompts import task_prompts

    tasks = {name: _messages(texts[:num_prompts]) for name, texts in map(task_prompts, task)}
    if width == "auto" and controls:
        raise UserError("controls need a fixed width", where="--controls", do="give --width a number, or leave it out")
    described = _described(deployment, context.params)
    engine, chosen = embedded_backend().engine(described), described.speculation.width
    assert described.drafter is not None and chosen != "off"  # noqa: PT018
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0)
    evaluation = _Evaluation(engine, chosen, params, quiet or as_json)
    report = EvaluationReport(
        target=described.target.model,
        drafter=described.drafter.model,
        width=chosen,
        max_tokens=max_tokens,
        temperature=temperature,
        dtype=engine.dtype,
        environment=environment(),
        tasks={name: evaluation.task(name, asked, controls is not False, speed) for name, asked in tasks.items()},
    )
    _put(report, output, as_json)


def _messages(texts: list[str]) -> list[Prompt]:
    return [[{"role": "user", "content": text}] for text in texts]


def _described(path: Path | None, given: Mapping[str, Any]) -> Deployment:
    """The pair with its width: the flag's, else the file's, else the whole block.

    Raises:
        UserError: anything about them that does not fit, or a width without speculation.
    """
    from dflash_serve.checkpoint.reader import read_config

    flags = options.deployment_flags(given)
    if path is None and given["target"] is None:
        flags |= {"target": {"model": options.BUNDLED}, "drafter": {"model": given["drafter"] or options.BUNDLED}}
    described = name_drafter(load_deployment(path, flags), embedded_backend(), quiet=given["quiet"])
    drafter = described.drafter
    if drafter is None:
        raise UserError("there is no drafter", where="evaluate", do="give --drafter")
    if "width" not in described.speculation.model_fields_set:
        block = described.speculation.block_size or read_config(drafter.model, drafter.revision)[0].block_size
        named = {"drafter": {"model": drafter.model, "revision": drafter.revision}}
        described = load_deployment(path, overlay(flags, {**named, "speculation": {"width": block}}))
    if described.limits.max_batch_size is None:
        limits = described.limits.model_copy(update={"max_batch_size": AT_ONCE})
        described = described.model_copy(update={"limits": limits})
    if described.speculation.width in ("off", 1):
        raise UserError("without speculation nothing is accepted", where="--width", do="give 2 or more, or auto")
    return described


def speed_up(engine: Engine, prompts: list[Prompt], params: SamplingParams) -> float | None:
    """Tokens/s with speculation by those without, each a median over the prompts, one at a time."""
    time_run(engine, prompts[0], params)  # warm-up
    return compare_with_plain(engine, prompts, params).ratio


@dataclass(frozen=True)
class _Evaluation:
    """Measures tasks with one engine at one width, all with the same sampling."""

    engine: Engine
    width: int | Literal["auto"]
    params: SamplingParams
    quiet: bool  # No progress is shown

    def task(self, name: str, asked: list[Prompt], controls: bool, speed: int) -> dict[str, TaskFigures]:
        """Measures a task as it is and under the controls; the first `speed` prompts are timed, too.

        Controls run at a fixed width only: with a spoilt drafter `auto` would hardly speculate.
        """
        engine = self.engine if self.width == "auto" else self.engine.fixed(self.width)
        sound = self._measure(engine, name, asked)
        if speed:
            sound = sound.model_copy(update={"speed_up": speed_up(self.engine, asked[:speed], self.params)})
        rows = {AS_IT_IS: sound}
        if self.width != "auto" and controls:
            for control in self.engine.controls:
                spoilt = self.engine.fixed(self.width, fault=control)
                rows[control] = self._measure(spoilt, f"{name}, {control}", asked)
        return rows

    def _measure(self, engine: Engine, label: str, asked: list[Prompt]) -> TaskFigures:
        from rich.console import Console
        from rich.progress import track

        from dflash_serve.speculation.statistics import total

        stream = engine.stream(asked, [self.params] * len(asked))
        finished: Iterable[Chunk] = (chunk for chunk in stream if chunk.finish_reason is not None)
        console = Console(stderr=True, quiet=self.quiet)
        if console.is_terminal and not self.quiet:  # a disabled bar would end with an empty line
            finished = track(finished, label, total=len(asked), console=console, transient=True)
        for _ in finished:
            pass
        whole = total(output.statistics for output in stream.outputs())
        return TaskFigures(
            prompts=len(asked),
            steps=whole.steps,
            tokens=whole.tokens,
            acceptance_length=whole.acceptance_length,
            survival=whole.survival(engine.block_size if self.width == "auto" else self.width),
        )


def _put(report: EvaluationReport, output: Path | None, as_json: bool) -> None:
    from rich.console import Console

    from dflash_serve.common.files import write_whole

    if output is not None:
        write_whole(output, report.model_dump_json(indent=1) + "\n", do="name another --output")
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        Console().print(_table(report))


def _table(report: EvaluationReport) -> Table:
    from rich.table import Table

    columns = ("task", "features", "prompts", "τ", "survival by slot", "speed-up")
    table = Table(*columns, caption=f"width {report.width}")
    for task, rows in report.tasks.items():
        for name, row in rows.items():
            ratio = "" if row.speed_up is None else number(row.speed_up, 2)
            length, survival = number(row.acceptance_length, 3), survival_text(row.survival)
            table.add_row(task, name, str(row.prompts), length, survival, ratio)
    return table
