"""Single-stream decoding, four ways in turns on the same prompts and weights (fp32 on CPU, bf16 on CUDA):

(a) Hugging Face `generate`, (b) z-lab's `dflash_generate`, (c) ours without speculation, (d) ours with `width: auto`.

    python -m benchmarks.decoding [--prompts 20] [--tokens 128] [--output benchmarks/results/decoding.json]

Each prompt runs through all four before the next begins, so a busy spell of the machine slows all alike. A prompt's
time is the whole call, prefill included; answers have `--tokens` tokens each. Writes a table and JSON.
"""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.peers import Bench, Ids
from benchmarks.turns import write_report
from dflash_serve.speculation.statistics import AcceptanceStatistics, total
from tests.support.prompts import human_eval, word_problems

WAYS = {"a": "HF", "b": "z-lab", "c": "ours, off", "d": "ours, auto"}
RATIOS = {"c/a": ("c", "a"), "d/b": ("d", "b"), "d/c": ("d", "c"), "d/a": ("d", "a")}


def main(
    prompts: Annotated[int, typer.Option(help="Prompts of each task.")] = 10,
    tokens: Annotated[int, typer.Option(help="Tokens of every answer.")] = 128,
    output: Annotated[Path | None, typer.Option(help="File for the JSON.")] = None,
) -> None:
    """Measure the four ways side by side."""
    bench = Bench(tokens, 1, "bfloat16" if torch.cuda.is_available() else "float32")
    tasks = {"word problems": word_problems(prompts), "HumanEval": human_eval(prompts)}
    measure(bench, bench.engine.tokenize(tasks["word problems"][0]))  # warm-up, not counted
    rows = [
        {"task": task, **measure(bench, bench.engine.tokenize(messages))}
        for task, many in tasks.items()
        for messages in track(many, f"{task}: four ways in turns")
    ]
    results = [summary(task, [row for row in rows if row["task"] == task]) for task in tasks]
    table = Table("task", *WAYS.values(), *RATIOS, "τ", "same tokens", title="tokens/s, medians")
    for row in results:
        figures = [f"{speed:.1f}" for speed in row["tokens_per_second"].values()]
        figures += [f"{ratio:.2f}" for ratio in row["ratios"].values()]
        length = row["acceptance_length"]
        shown = "off" if length is None else f"{length:.2f}"
        table.add_row(row["task"], *figures, shown, f"{row['same_tokens']} of {row['prompts']}")
    Console().print(table)
    write_report({"dtype": bench.engine.dtype, "batch": 1, "tokens": tokens}, results, output, prompts=rows)


def measure(bench: Bench, ids: Ids) -> dict[str, Any]:
    """Tokens per second of each way on one prompt, whether all agree up to an end of sequence, and (d)'s acceptance."""
    found = bench.round([ids], list(WAYS.values()))
    stops = bench.engine.scheduler.target.config.eos_token_ids
    answers = {tuple(takewhile(lambda token: token not in stops, each["answers"][0])) for each in found.values()}
    return {
        "tokens_per_second": {way: found[name]["tokens_per_second"] for way, name in WAYS.items()},
        "same_tokens": len(answers) == 1,
        "acceptance": bench.statistics.to_dict(),
    }


def summary(task: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over prompts. A ratio is the median of the prompts' own ratios, each measured side by side."""
    speeds = [row["tokens_per_second"] for row in rows]
    accepted = total(AcceptanceStatistics.from_dict(row["acceptance"]) for row in rows)
    return {
        "task": task,
        "prompts": len(rows),
        "same_tokens": sum(row["same_tokens"] for row in rows),
        "tokens_per_second": {way: median(speed[way] for speed in speeds) for way in WAYS},
        "ratios": {name: median(speed[x] / speed[y] for speed in speeds) for name, (x, y) in RATIOS.items()},
        "acceptance_length": accepted.acceptance_length,
        "widths": accepted.widths,
    }


if __name__ == "__main__":
    typer.run(main)
