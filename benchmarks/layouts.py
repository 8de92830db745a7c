"""Which weight layout is good at the row counts speculation verifies? Times the matrix products of one target pass.

    python benchmarks/layouts.py [--output benchmarks/results/layouts.json]

All layers and the head of SmolLM2-135M, fp32, on this CPU: PyTorch's plain layout, the transposed one, oneDNN's
packed one, and the one that the embedded backend takes on this machine. Rounds are interleaved; medians in ms.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.decoding import measured_on
from dflash_serve.common.provenance import versions
from dflash_serve.models.layers import pack_linear

LAYERS = 30
SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576)]
HEAD = (576, 49152)
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 64)
Product = Callable[[Tensor], Tensor]


def layouts(linear: nn.Linear) -> dict[str, Product]:
    """The ways to hold one weight [out, in]."""
    transposed = linear.weight.detach().t().contiguous().t()
    return {
        "plain": linear,
        "transposed": lambda x: F.linear(x, transposed),
        "onednn": pack_linear(linear, compiled=False),
        "ours": pack_linear(linear),
    }


@torch.inference_mode()
def main(
    repetitions: Annotated[int, typer.Option(help="Rounds of each.")] = 9,
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    """Measure and print."""
    torch.manual_seed(0)
    shapes = SHAPES * LAYERS + [HEAD]
    model = [layouts(nn.Linear(i, o, bias=False)) for i, o in shapes]
    times: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in ROWS} for name in model[0]}
    for _ in range(repetitions):
        for rows in ROWS:
            inputs = [torch.randn(rows, i) for i, _ in shapes]
            for name, kept in times.items():
                start = perf_counter()
                for products, x in zip(model, inputs, strict=True):
                    products[name](x)
                kept[rows].append(1e3 * (perf_counter() - start))
    medians = {name: {rows: median(kept[rows]) for rows in ROWS} for name, kept in times.items()}
    table = Table("layout", *(str(rows) for rows in ROWS), title="ms of one pass's products, by rows")
    for name, by_rows in medians.items():
        table.add_row(name, *(f"{value:.1f}" for value in by_rows.values()))
    Console().print(table)
    if output is not None:
        report = {"environment": measured_on(), "versions": versions("torch"), "milliseconds": medians}
        output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
