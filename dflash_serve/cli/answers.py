"""Verbs that answer prompts in this process: `dflash-serve generate` one, `evaluate` those of tasks, with controls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any, Literal

import typer
from pydantic import Field, ValidationError
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from dflash_serve.adapter.checks import block_size_of
from dflash_serve.adapter.registry import embedded_backend
from dflash_serve.answers.engine import Chunk, Engine, Prompt, RequestOutput
from dflash_serve.answers.llm import LLM
from dflash_serve.answers.prompts import context_needed, task_prompts, template_kwargs, with_variables
from dflash_serve.cli import options
from dflash_serve.cli.options import described_pair, number, survival_text
from dflash_serve.common.extras import need
from dflash_serve.common.files import require_file, write_whole
from dflash_serve.common.provenance import Environment, environment
from dflash_serve.common.settings import Frozen, describe
from dflash_serve.deployment.description import Deployment
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams
from dflash_serve.speculation.statistics import total

Compare = Annotated[bool, typer.Option("--compare", help="Measure the same prompt without speculation, side by side.")]
ROUNDS = 3  # Answers with speculation and without, in a comparison
TASKS = "Task: gsm8k, math500, mbpp, mt-bench (from the hub), humaneval, or NAME=FILE.jsonl; once for each."
Tasks = Annotated[list[str], typer.Option(help=TASKS)]
SPOILT = "Measure with spoilt features, too. [default: yes, but not at --width auto]"
Controls = Annotated[bool | None, typer.Option(help=SPOILT)]
TIMED = "How many prompts of a task to time alone, with and without speculation in turns."
Speed = Annotated[int, typer.Option(help=TIMED, min=0)]

AT_ONCE = 16  # Requests at once by default
AS_IT_IS = "as it is"  # The drafter with its own features, in contrast to the controls


def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    deployment: options.DeploymentOption = None,
    target: options.Target = None,
    drafter: options.Drafter = None,
    block_size: options.BlockSize = None,
    width: options.Width = None,
    dtype: options.Dtype = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this mass; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample among so many likeliest tokens; 0 is off.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    raw: options.Raw = False,
    chat_template_kwargs: options.TemplateKwargs = None,
    compare: Compare = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Stream an answer, then print acceptance length, survival and speed."""
    need("torch", "safetensors", "torch", "transformers")
    if temperature == 0:
        options.refuse_ignored(context, ("top_p", "top_k"), "answers are greedy", "give --temperature, too")
    console = Console(stderr=as_json, highlight=False, markup=False, emoji=False)
    try:
        params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens)
    except ValidationError as error:
        raise UserError(describe(error)) from None
    variables = template_kwargs(chat_template_kwargs)
    asked = with_variables(prompt if raw else [{"role": "user", "content": prompt}], variables)
    flags = options.deployment_flags({**context.params, "max_batch_size": 1})
    described = described_pair(deployment, flags, embedded_backend(), quiet=quiet)
    if compare and (described.drafter is None or described.speculation.width in ("off", 1)):
        raise UserError("it does not speculate", where="--compare", do="name a drafter, and no width of off")
    with console.status(Text(f"loading {described.target.model} (the first time it is converted and measured)")):
        llm = LLM(described)

    def show(text: str) -> None:
        print(text, end="", flush=True)

    run = time_run(llm.engine, asked, params, None if as_json else show)
    comparison = None
    if compare:
        with console.status("the same prompt with and without speculation, in turns"):
            comparison = compare_with_plain(llm.engine, [asked] * ROUNDS, params)
    if as_json:
        typer.echo(json.dumps({**_report(run, comparison), "chat_template_kwargs": variables}, indent=2))
    else:
        show("\n\n")
        for line in () if quiet else _summary(described.speculation.width, run, comparison):
            console.print(line, soft_wrap=True)
    if comparison is not None and not comparison.same_tokens and temperature == 0:
        console.print("The two answers differ: in bfloat16 a near-tie may, in float32 it is a fault.", style="yellow")
        raise typer.Exit(1)


@dataclass(frozen=True)
class TimedRun:
    """One answer and how fast it came."""

    output: RequestOutput
    seconds: float  # Time from the first chunk to the last: decoding without the prompt
    tokens: int  # Tokens that came in that time

    @property
    def tokens_per_second(self) -> float | None:
        """None where there was nothing to time."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None

    @property
    def survival(self) -> list[float | None]:
        """Survival of every slot that a step has verified."""
        statistics = self.output.statistics
        return statistics.survival(max(statistics.widths or (), default=1))


@dataclass(frozen=True)
class SpeedComparison:
    """Speed with and without speculation: medians over interleaved rounds. An unknown figure is None."""

    tokens_per_second: float | None
    plain_tokens_per_second: float | None
    ratio: float | None
    rounds: int
    same_tokens: bool


def time_run(
    engine: Engine, prompt: Prompt, params: SamplingParams, show: Callable[[str], None] | None = None
) -> TimedRun:
    """Runs one prompt, handing each piece of text to `show` as it comes."""
    first = end = 0.0
    tokens = -1
    stream = engine.stream([prompt], [params])
    for chunk in stream:
        end = perf_counter()
        if tokens < 0:
            first, tokens = end, 0
        else:
            tokens += len(chunk.token_ids)
        if show:
            show(chunk.text)
    return TimedRun(stream.outputs()[0], end - first, max(tokens, 0))


def compare_with_plain(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams) -> SpeedComparison:
    """Each prompt with and without speculation, in turns, so that a busy machine slows both alike.

    The engine should have run before: its first run pays for more than itself. `params` should fix the seed where it
    samples: the same seed gives the same tokens with any width.
    """
    plain = engine.plain()
    pairs = [(time_run(engine, prompt, params), time_run(plain, prompt, params)) for prompt in prompts]

    def median_speed(runs: Sequence[TimedRun]) -> float | None:
        speeds = [run.tokens_per_second for run in runs if run.tokens_per_second is not None]
        return median(speeds) if speeds else None

    speed, plain_speed = (median_speed(runs) for runs in zip(*pairs, strict=True))
    ratio = speed / plain_speed if speed and plain_speed else None
    same = all(run.output.token_ids == plain_run.output.token_ids for run, plain_run in pairs)
    return SpeedComparison(speed, plain_speed, ratio, len(pairs), same)


def _report(run: TimedRun, comparison: SpeedComparison | None) -> dict[str, Any]:
    output = run.output
    report = {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "tokens": len(output.token_ids),
        "tokens_per_second": run.tokens_per_second,
        "acceptance_length": output.statistics.acceptance_length,
        "tokens_per_step": output.statistics.tokens_per_step,
        "survival": run.survival,
        "widths": dict(sorted((output.statistics.widths or {}).items())),
    }
    return report if comparison is None else report | {"comparison": asdict(comparison)}


def _summary(setting: int | str, run: TimedRun, comparison: SpeedComparison | None) -> Iterator[str]:
    statistics = run.output.statistics
    yield f"{len(run.output.token_ids)} tokens, {number(run.tokens_per_second, 1)} tokens/s"
    if statistics.acceptance_length is not None:
        widths = ", ".join(f"{width}: {steps}" for width, steps in sorted((statistics.widths or {}).items()))
        survival = survival_text(run.survival)
        yield f"acceptance length τ = {statistics.acceptance_length:.2f}; survival by slot {survival}"
        yield f"width ({setting}) x steps: {widths}"
    if comparison is not None:
        same = "identical tokens" if comparison.same_tokens else "DIFFERENT tokens"
        yield (
            f"without speculation {number(comparison.plain_tokens_per_second, 1)} tokens/s, "
            f"with {number(comparison.tokens_per_second, 1)}: {number(comparison.ratio, 2)}x "
            f"(medians of {comparison.rounds} interleaved runs), {same}"
        )


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
    deployment: dict[str, Any]  # The whole deployment that was measured, without defaults
    width: int | Literal["auto"]  # Slots verified in a step; auto = chosen by the engine in each step
    max_tokens: int
    temperature: float
    chat_template_kwargs: dict[str, Any] = Field(
        default={}
    )  # thinking on or off changes acceptance by up to a factor of two
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
    chat_template_kwargs: options.TemplateKwargs = None,
    controls: Controls = None,
    speed: Speed = 4,
    output: Annotated[Path | None, typer.Option(help=options.REPORT)] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure a drafter task by task: the bundled pair, that of a deployment, or a named one."""
    need("torch", "safetensors", "torch", "transformers")
    variables = template_kwargs(chat_template_kwargs)
    tasks: dict[str, list[Prompt]] = {}
    for name, texts in map(task_prompts, task):
        if name in tasks:
            raise UserError(f"two tasks are called {name!r}", where="--task", do="give each a name: NAME=FILE.jsonl")
        tasks[name] = [with_variables([{"role": "user", "content": text}], variables) for text in texts[:num_prompts]]
    described = _with_width(deployment, context.params)
    if described.speculation.width == "auto" and controls:
        raise UserError("controls need a fixed width", where="--controls", do="give --width a number, or leave it out")
    if output is not None:
        require_file(output)
    if described.limits.max_model_len is None:
        each = [prompt for prompts in tasks.values() for prompt in prompts]
        room = context_needed(described.target, each, max_tokens)
        described = described.model_copy(update={"limits": described.limits.model_copy(update={"max_model_len": room})})
    engine, chosen = embedded_backend().engine(described), described.speculation.width
    assert described.drafter is not None and chosen != "off"  # noqa: PT018
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0)
    evaluation = _Evaluation(engine, chosen, params, quiet or as_json)
    report = EvaluationReport(
        target=described.target.model,
        drafter=described.drafter.model,
        deployment=described.model_dump(mode="json", exclude_defaults=True),
        width=chosen,
        max_tokens=max_tokens,
        temperature=temperature,
        chat_template_kwargs=variables,
        dtype=engine.dtype,
        environment=environment(),
        tasks={name: evaluation.task(name, asked, controls is not False, speed) for name, asked in tasks.items()},
    )
    if output is not None:
        write_whole(output, report.model_dump_json(indent=1) + "\n", do="name another --output")
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        Console(markup=False, emoji=False).print(_table(report))


def _with_width(path: Path | None, given: Mapping[str, Any]) -> Deployment:
    """The pair with its width: the flag's, else the file's, else the whole block.

    Raises:
        UserError: anything about them that does not fit, or a width without speculation.
    """
    found = described_pair(path, options.deployment_flags(given), embedded_backend(), quiet=given["quiet"])
    speculation, limits = found.speculation, found.limits
    if found.drafter is None:
        raise UserError("there is no drafter", where="evaluate", do="give --drafter")
    if "width" not in speculation.model_fields_set:
        speculation = speculation.model_copy(update={"width": block_size_of(found)})
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
