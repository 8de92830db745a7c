"""Host time of one greedy decoding step in SGLang: its own DFlash step, ours of width 4, and the width policy's part.

    .venv-sglang/bin/python -m benchmarks.narrow_step [--output benchmarks/results/narrow-step.json]

SGLang's real server starts on the CPU with a tiny pair (blocks of 16 slots) and measures itself, thread CPU time,
before it serves. Both models' passes are left out. Kernels that a GPU has fused are a few operators each here, the
same ones in both steps, whose times grow with requests and rows; on a GPU they do not. `auto` adds a decision before
the launch, and the reading of the result after it, while the device works.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dflash_serve.adapter.launch import running_server
from dflash_serve.common.provenance import environment
from dflash_serve.common.reports import write_json
from dflash_serve.deployment.variables import COST_TABLE
from tests.support.sglang_server import PATIENCE, OnCpu, deployment, tiny_pair
from tests.support.tiny import write_tiny_drafter

BLOCK, REQUESTS = 16, 64
COSTS = {"target": {1: 1.0, 64: 1.5, 1024: 10.0}, "draft": {1: 0.1, 64: 0.1}}
"""At these the policy chooses widths between 1 and 16."""


def main(output: Annotated[Path | None, typer.Option(help="write the figures here")] = None) -> None:
    """Measures, and prints a table."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        target, config = tiny_pair(folder, BLOCK)
        models = target, write_tiny_drafter(folder / "drafter", config)
        (folder / "costs.json").write_text(json.dumps(COSTS))
        env = {"SGLANG_CPU_STEPS": str(folder / "steps.json"), COST_TABLE: str(folder / "costs.json")}
        wanted = deployment(models, requests=REQUESTS, width="auto")
        with running_server(OnCpu(env=env), wanted, folder / "server", patience=PATIENCE):
            found = json.loads((folder / "steps.json").read_text())
    table = Table("requests", *next(iter(found.values())), title="microseconds (operators) of a step")
    for requests, ways in found.items():
        table.add_row(requests, *(f"{time:.0f} ({operators})" for time, operators in ways.values()))
    Console().print(table)
    if output is not None:
        write_json(output, {"environment": environment().model_dump(), "steps": found})


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    typer.run(main)
