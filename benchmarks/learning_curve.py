"""What a drafter's training gave, stage by stage: data, anchors and minutes spent, and what came of them.

    dflash-serve train RECIPE.yaml --output RUN
    dflash-serve evaluate --drafter RUN/drafter --task ... --output RUN/evaluate.json
    python -m benchmarks.learning_curve RUN [RUN ...] --output benchmarks/results/learning-curve.json

One row a run, in the order in which they are given. Held-out figures are of the step that was published, with blocks of
the stage's own size; τ by task is `evaluate`'s, through the real loop.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.decoding import write_report
from dflash_serve.checkpoint.reader import read_config
from dflash_serve.checkpoint.source import PROVENANCE
from dflash_serve.training.run import DRAFTER


def main(
    runs: Annotated[list[Path], typer.Argument(help="Folders of `train --output`, in the order of the stages.")],
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    """Gather the stages into one table."""
    stages = [stage(run) for run in runs]
    table = Table("stage", "B", "answers", "anchors", "minutes", "anchors/s", "slot 1", "τ held out", "τ by task")
    for row in stages:
        held_out, tau = row["held_out"] or {}, row["tau"] or {}
        table.add_row(
            row["stage"], str(row["block_size"]), f"{row['answers']:,}", f"{row['anchors']:,}", f"{row['minutes']:.0f}",
            f"{row['anchors'] / max(1, 60 * row['minutes']):.0f}",
            *([f"{held_out['slot_accuracy'][0]:.3f}", f"{held_out['replayed_tau']:.2f}"] if held_out else ["", ""]),
            ", ".join(f"{task} {value:.2f}" for task, value in tau.items()),
        )  # fmt: skip
    Console().print(table)
    write_report({"stages": stages}, output)


def stage(run: Path) -> dict[str, Any]:
    """What one run spent and reached."""
    provenance = json.loads((run / DRAFTER / PROVENANCE).read_text(encoding="utf-8"))
    log = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    since = [0.0, *(row["seconds"] for row in log[:-1])]
    anchors = sum(row["anchors_per_second"] * (row["seconds"] - before) for row, before in zip(log, since, strict=True))
    report = run / "evaluate.json"
    tasks = json.loads(report.read_text(encoding="utf-8"))["tasks"] if report.exists() else {}
    kept = ("answers", "answer_tokens", "text_tokens", "steps", "hardware", "commit", "recipe_sha256")
    return {
        "stage": run.name,
        "block_size": read_config(run / DRAFTER)[0].block_size,
        **{key: provenance[key] for key in kept},
        "anchors": round(anchors),
        "minutes": round(provenance["training_seconds"] / 60, 1),
        "data_minutes": round(provenance["data_seconds"] / 60, 1),
        "held_out": provenance["validation"],
        "tau": {task: round(ways["as it is"]["acceptance_length"], 3) for task, ways in tasks.items()} or None,
        "survival": {task: ways["as it is"]["survival"] for task, ways in tasks.items()} or None,
    }


if __name__ == "__main__":
    typer.run(main)
