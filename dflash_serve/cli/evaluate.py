"""`dflash-serve evaluate`: τ, survival and speed-up per task through the real decoding loop, with controls beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_serve.cli.comparison import speed_up
from dflash_serve.cli.options import BUNDLED

if TYPE_CHECKING:
    from dflash_serve.speculation.params import SamplingParams
    from dflash_torch.evaluation import Evaluation
    from dflash_torch.faults.fault import Fault


def evaluate(
    task: Annotated[
        list[str], typer.Option(help="gsm8k, math500, mbpp, mt-bench (from the hub), humaneval, or NAME=FILE.jsonl.")
    ],
    target: Annotated[str, typer.Option(help="Hub id, folder, or the bundled smollm2.")] = BUNDLED,
    drafter: Annotated[str, typer.Option(help="Likewise.")] = BUNDLED,
    prompts: Annotated[int, typer.Option(help="Prompts of each task.", min=1)] = 20,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=2)] = 128,
    width: Annotated[int | None, typer.Option(help="Slots verified a step. [default: the whole block]")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    batch: Annotated[int, typer.Option(help="Prompts at once.", min=1)] = 16,
    controls: Annotated[bool, typer.Option(help="Repeat with features shuffled, zeroed and off by a layer.")] = True,
    speed: Annotated[int, typer.Option(help="Prompts timed alone, with and without speculation in turns.", min=0)] = 4,
    output: Annotated[Path | None, typer.Option(help="Write JSON here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what a drafter is worth, task by task."""
    from rich.console import Console

    from dflash_serve import LLM, SamplingParams
    from dflash_serve.prompts.tasks import task_prompts
    from dflash_serve.training.provenance import commit, hardware, versions
    from dflash_torch.controls import controls as controls_of
    from dflash_torch.evaluation import Evaluation

    tasks = {name: texts[:prompts] for name, texts in map(task_prompts, task)}
    fixed: dict[str, Any] = {"width": "auto" if width is None else width}
    llm = LLM(target, drafter, max_batch_size=batch, **fixed)
    scheduler: Any = llm.engine.scheduler  # type: ignore[attr-defined]
    evaluation = Evaluation(llm.engine, width or scheduler.speculator.block_size)  # type: ignore[arg-type]
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0)
    settings = {"target": target, "drafter": drafter, "width": evaluation.width, "max_tokens": max_tokens}
    where = {"commit": commit(), "versions": versions(), "hardware": hardware(scheduler.target.embedding.device)}
    report: dict[str, Any] = {**settings, "temperature": temperature, **where, "tasks": {}}
    for name, texts in tasks.items():
        faults = {"as it is": None, **(controls_of(scheduler.speculator) if controls else {})}
        report["tasks"][name] = {
            variant: _measure(evaluation, name, texts, params, fault) for variant, fault in faults.items()
        }
        if speed:
            asked = [[{"role": "user", "content": text}] for text in texts[:speed]]
            report["tasks"][name]["as it is"]["speed_up"] = speed_up(llm.engine, asked, params)
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        Console().print(_table(report))


def _measure(
    evaluation: Evaluation, name: str, texts: list[str], params: SamplingParams, fault: Fault | None
) -> dict[str, Any]:
    from rich.progress import track

    from dflash_serve.speculation.statistics import AcceptanceStatistics

    asked = [[{"role": "user", "content": text}] for text in texts]
    label = f"{name}, {fault.name}" if fault else name
    each = track(evaluation.run(asked, params, fault), label, total=len(asked), transient=True)
    total = sum(each, start=AcceptanceStatistics())
    return {
        "prompts": len(texts),
        "steps": total.steps,
        "tokens": total.tokens,
        "acceptance_length": total.acceptance_length,
        "survival": total.survival(evaluation.width),
    }


def _table(report: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table("task", "features", "prompts", "τ", "survival by slot", "speed-up")
    for task, variants in report["tasks"].items():
        for name, row in variants.items():
            survival = " ".join("?" if value is None else f"{value:.2f}" for value in row["survival"])
            length = row["acceptance_length"]
            shown = "unknown" if length is None else f"{length:.3f}"
            ratio = row.get("speed_up")
            table.add_row(task, name, str(row["prompts"]), shown, survival, f"{ratio:.2f}" if ratio else "")
    return table
