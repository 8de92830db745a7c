"""`dflash-serve evaluate`: τ, survival and speed-up by task, through the real decoding loop, with controls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dflash_serve.backend import Chunk, Engine, Prompt, embedded_backend
from dflash_serve.checkpoint.reader import read_config
from dflash_serve.cli import options
from dflash_serve.cli.generate import compare_with_plain, time_run
from dflash_serve.cli.options import described_pair, number, survival_text
from dflash_serve.common.extras import need
from dflash_serve.common.files import write_whole
from dflash_serve.common.provenance import Environment, environment
from dflash_serve.common.settings import Frozen
from dflash_serve.deployment import Deployment
from dflash_serve.errors import UserError
from dflash_serve.prompts import task_prompts
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import total

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
    tasks = {name: _messages(texts[:num_prompts]) for name, texts in map(task_prompts, task)}
    if width == "auto" and controls:
        raise UserError("controls need a fixed width", where="--controls", do="give --width a number, or leave it out")
    described = _with_width(deployment, context.params)
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
    if output is not None:
        write_whole(output, report.model_dump_json(indent=1) + "\n", do="name another --output")
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        Console().print(_table(report))


def _messages(texts: list[str]) -> list[Prompt]:
    return [[{"role": "user", "content": text}] for text in texts]


def _with_width(path: Path | None, given: Mapping[str, Any]) -> Deployment:
    """The pair with its width: the flag's, else the file's, else the whole block.

    Raises:
        UserError: anything about them that does not fit, or a width without speculation.
    """
    found = described_pair(path, options.deployment_flags(given), embedded_backend(), quiet=given["quiet"])
    drafter, speculation, limits = found.drafter, found.speculation, found.limits
    if drafter is None:
        raise UserError("there is no drafter", where="evaluate", do="give --drafter")
    if "width" not in speculation.model_fields_set:
        block = speculation.block_size or read_config(drafter.model, drafter.revision)[0].block_size
        speculation = speculation.model_copy(update={"width": block})
    if speculation.width in ("off", 1):
        raise UserError("without speculation nothing is accepted", where="--width", do="give 2 or more, or auto")
    if limits.max_batch_size is None:
        limits = limits.model_copy(update={"max_batch_size": AT_ONCE})
    return found.model_copy(update={"speculation": speculation, "limits": limits})


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
            time_run(self.engine, asked[0], self.params)  # warm-up
            ratio = compare_with_plain(self.engine, asked[:speed], self.params).ratio
            sound = sound.model_copy(update={"speed_up": ratio})
        rows = {AS_IT_IS: sound}
        if self.width != "auto" and controls:
            for control in self.engine.controls:
                spoilt = self.engine.fixed(self.width, fault=control)
                rows[control] = self._measure(spoilt, f"{name}, {control}", asked)
        return rows

    def _measure(self, engine: Engine, label: str, asked: list[Prompt]) -> TaskFigures:
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


def _table(report: EvaluationReport) -> Table:
    columns = ("task", "features", "prompts", "τ", "survival by slot", "speed-up")
    table = Table(*columns, caption=f"width {report.width}")
    for task, rows in report.tasks.items():
        for name, row in rows.items():
            ratio = "" if row.speed_up is None else number(row.speed_up, 2)
            length, survival = number(row.acceptance_length, 3), survival_text(row.survival)
            table.add_row(task, name, str(row.prompts), length, survival, ratio)
    return table
