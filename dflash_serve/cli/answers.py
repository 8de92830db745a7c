"""Verbs that answer prompts in this process: `dflash-serve generate` one, `evaluate` those of tasks, with controls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from dflash_serve.adapter.registry import embedded_backend
from dflash_serve.answers import evaluation
from dflash_serve.answers.evaluation import (
    EvaluationReport,
    SpeedComparison,
    TaskFigures,
    TimedRun,
    compare_with_plain,
    time_run,
)
from dflash_serve.answers.groups import Dimension, LabelledPrompt
from dflash_serve.answers.llm import LLM
from dflash_serve.answers.prompts import task_prompts, template_kwargs, with_variables
from dflash_serve.cli import options
from dflash_serve.cli.options import described_pair
from dflash_serve.common.extras import need
from dflash_serve.common.files import require_file
from dflash_serve.common.progress import doing, shown
from dflash_serve.common.reports import number, survival_text, write_json
from dflash_serve.common.settings import describe
from dflash_serve.common.terminal import keep_names, table
from dflash_serve.errors import UserError, did_you_mean
from dflash_serve.speculation.params import SamplingParams

Compare = Annotated[bool, typer.Option("--compare", help="Measure the same prompt without speculation, side by side.")]
ROUNDS = 3  # Answers with speculation and without, in a comparison
TASKS = "Task: gsm8k, math500, mbpp, mt-bench (from the hub), humaneval, or NAME=FILE.jsonl; once for each."
Tasks = Annotated[list[str], typer.Option(help=TASKS)]
SPOILT = "Measure with spoilt features, too. [default: yes, but not at --width auto]"
Controls = Annotated[bool | None, typer.Option(help=SPOILT)]
BY = "Acceptance by length (of the context), language, thinking (fields of the prompts' lines), with commas between."
By = Annotated[str | None, typer.Option("--by", metavar="GROUPS", help=BY)]
TIMED = "How many prompts of a task to time alone, with and without speculation in turns."
Speed = Annotated[int, typer.Option(help=TIMED, min=0)]


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
    with shown(quiet=quiet), doing(f"loading {described.target.model}"):
        llm = LLM(described)

    def show(text: str) -> None:
        print(text, end="", flush=True)

    run = time_run(llm.engine, asked, params, None if as_json else show)
    if not as_json:
        show("\n")  # The progress of a comparison begins on a line of its own.
    comparison = None
    if compare:
        with shown(quiet=quiet):
            comparison = compare_with_plain(llm.engine, [asked] * ROUNDS, params)
    if as_json:
        typer.echo(json.dumps({**_report(run, comparison), "chat_template_kwargs": variables}, indent=2))
    else:
        show("\n")
        for line in () if quiet else _summary(described.speculation.width, run, comparison):
            console.print(line, soft_wrap=not console.is_terminal)
    if comparison is not None and not comparison.same_tokens and temperature == 0:
        console.print("The two answers differ: in bfloat16 a near-tie may, in float32 it is a fault.", style="yellow")
        raise typer.Exit(1)


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
    by: By = None,
    controls: Controls = None,
    speed: Speed = 4,
    output: Annotated[Path | None, typer.Option(help=options.REPORT)] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure a drafter task by task: the bundled pair, that of a deployment, or a named one."""
    need("torch", "safetensors", "torch", "transformers")
    variables = template_kwargs(chat_template_kwargs)
    dimensions = _dimensions(by)
    tasks: dict[str, list[LabelledPrompt]] = {}
    for name, prompts in (task_prompts(text, variables) for text in task):
        if name in tasks:
            raise UserError(f"two tasks are called {name!r}", where="--task", do="give each a name: NAME=FILE.jsonl")
        tasks[name] = prompts[:num_prompts]
    if output is not None:
        require_file(output)
    flags = options.deployment_flags(context.params)
    described = described_pair(deployment, flags, embedded_backend(), quiet=quiet)
    with shown(quiet=quiet):
        report = evaluation.evaluate(
            described,
            tasks,
            max_tokens=max_tokens,
            temperature=temperature,
            controls=controls,
            timed=speed,
            by=dimensions,
        )
    if output is not None:
        write_json(output, report)
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        console = Console(markup=False, emoji=False)
        console.print(_table(report))
        for dimension, groups in report.by.items():
            console.print(_groups_table(dimension, groups))


def _dimensions(by: str | None) -> list[Dimension]:
    known = [one for one in Dimension if one is not Dimension.task]  # Tasks have a table of their own
    found = list[Dimension]()
    for name in by.split(",") if by is not None else ():
        dimension = next((one for one in known if one == name.strip()), None)
        if dimension is None:
            do = did_you_mean(name.strip(), known) or f"give some of {', '.join(known)}"
            raise UserError(f"{name.strip()!r} is no group", where="--by", do=do)
        found.append(dimension)
    return list(dict.fromkeys(found))


def _groups_table(dimension: Dimension, groups: Mapping[str, TaskFigures]) -> Table:
    made = table("context tokens" if dimension is Dimension.length else dimension, "prompts", "steps", "τ", "survival")
    for name, row in groups.items():
        figures = (number(row.steps, 0), number(row.acceptance_length, 3), survival_text(row.survival))
        made.add_row(name, str(row.prompts), *figures)
    return keep_names(made)


def _table(report: EvaluationReport) -> Table:
    columns = ("task", "features", "prompts", "τ", "survival by slot", "speed-up")
    made = table(*columns, caption=f"width {report.width}")
    for task, rows in report.tasks.items():
        for name, row in rows.items():
            ratio = "" if row.speed_up is None else number(row.speed_up, 2)
            length, survival = number(row.acceptance_length, 3), survival_text(row.survival)
            made.add_row(task, name, str(row.prompts), length, survival, ratio)
    return keep_names(made)
