"""The width policy against what hindsight would have chosen, in a simulator: no model, no waiting.

    python -m benchmarks.policy [--seeds 4] [--output benchmarks/results/policy.json] [--before FILE]

Every cell is a cost surface (this project's bundled pair on two CPU cores, in the embedded engine and in SGLang's
server, where all requests of a step have one width; Qwen3-8B on three GPUs), a number of requests, a context length and
a kind of requests. In each run, on the same luck: every fixed width, the policy from a cold start with costs measured
some 20 % wrongly, the policy as it was before, and an oracle that knows true survival and true costs. Figures are
ratios of tokens per second, means over seeds: of the first 100 steps, and of 500.

The policy as it was takes most of the time, and what it does in a cell changes no more: `--before` takes its figures
from an earlier report, however many seeds it played it with there, and plays it in the other cells only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.policy_before import AutoWidthBefore
from benchmarks.simulator import STEPS, Cell, Load, Neighbour, Oracle, Synthetic, replays, run, surfaces
from dflash_serve.common.provenance import commit, now
from dflash_serve.speculation.belief import Vector
from dflash_serve.speculation.costs import CostModel
from dflash_serve.speculation.policy import FixedWidth, WidthPolicy
from dflash_serve.speculation.width import AutoWidth

NEVER = 1.0
"""The acceptance length of a drafter that is never right."""
LEAST = {"auto / best fixed, 100 steps": 0.95, "auto / best fixed": 0.97, "auto / off": 0.99}
"""What every cell is to reach; and the mean over cells 0.97 of the oracle."""
Make = Callable[[int], WidthPolicy | Oracle]
Ratios = dict[str, float]


def grid() -> list[Cell]:
    """All cells."""
    lengths = (NEVER, 1.1, 1.5, 2.0, 3.0, 4.5, 6.5)
    cpu, server, *gpus = surfaces()
    loads: list[Load] = [
        *(Synthetic(f"τ {length:g}" if length > NEVER else "never right", (length,)) for length in lengths),
        Synthetic("half τ 5, half 1.15", (5.0, 1.15)),
        Synthetic("drifting, τ 5 to 1.15", (5.0, 1.15), drifts=True),
    ]
    cells = [Cell(cpu, load, n) for n in (1, 2, 4, 8, 16, 32) for load in (*loads, *replays())]
    cells += [Cell(server, load, n) for n in (1, 2, 4, 8, 16) for load in (*loads, *replays())]
    few: list[Load] = [loads[0], loads[2], *loads[4:6], Synthetic("τ 8", (8.0,)), *loads[7:]]
    for gpu in gpus:
        cells += [Cell(gpu, load, n) for n in (1, 8, 64, 256) for load in few]
        cells += [Cell(gpu, load, n, context) for n, context in ((1, 65_536), (16, 16_384)) for load in few[1:4]]
    for neighbour in (Neighbour("busy from step 250", 250, STEPS), Neighbour("busy now and then", 45, 70)):
        cells += [Cell(surface, load, 4, neighbour=neighbour) for surface in (cpu, gpus[-1]) for load in loads[2:6]]
    return cells


@dataclass(frozen=True)
class Result:
    """Ratios of one cell."""

    cell: Cell
    best: int
    """The best fixed width in hindsight, over all steps."""
    ratios: Ratios


@dataclass(frozen=True)
class Job:
    """A cell to play."""

    cell: Cell
    seeds: int
    before: Ratios | None = None
    """What the policy as it was came to, where that is known."""


def play(job: Job) -> Result:
    """All policies on one cell."""
    cell, seeds = job.cell, job.seeds
    surface = cell.surface

    def mean(make: Make) -> Vector:
        return np.asarray(np.mean([run(cell, make(seed), seed) for seed in range(seeds)], axis=0))

    def cost(seed: int) -> CostModel:
        return surface.measured(cell.requests, np.random.default_rng(seed + 77))

    widths = surface.widths or [width for width in (1, 2, 3, 4, 6, 8, 12, 16) if width <= surface.block_size]
    fixed = {width: mean(lambda _, width=width: FixedWidth(width)) for width in widths}  # type: ignore[misc]
    auto = mean(lambda seed: AutoWidth(cost(seed), surface.block_size, surface.widths))
    best = np.max(list(fixed.values()), axis=0)
    oracle = mean(lambda _: Oracle(cell)) if isinstance(cell.load, Synthetic) else None

    def ratios(name: str, rates: Vector) -> Ratios:
        found = {
            f"{name} / best fixed, 100 steps": rates[0] / best[0],
            f"{name} / best fixed": rates[1] / best[1],
            f"{name} / off": rates[1] / fixed[1][1],
        }
        if oracle is not None:
            found[f"{name} / oracle"] = rates[1] / oracle[1]
        return {ratio: float(value) for ratio, value in found.items()}

    before = job.before or ratios(
        "before", mean(lambda seed: AutoWidthBefore(cost(seed), surface.block_size, surface.widths))
    )
    return Result(cell, max(fixed, key=lambda width: fixed[width][1]), ratios("auto", auto) | before)


def main(
    seeds: Annotated[int, typer.Option(help="Runs of every cell; a few more where there are few requests.")] = 4,
    only: Annotated[str, typer.Option(help="Cells whose description has this in it.")] = "",
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes, and the picture beside it.")] = None,
    workers: Annotated[int, typer.Option(help="Processes.")] = 2,
    before: Annotated[Path | None, typer.Option(help="A report to take the policy as it was from.")] = None,
) -> None:
    """Play every cell."""
    cells = [cell for cell in grid() if only in described(cell)]
    known = {} if before is None else earlier(before)
    runs = [seeds * (4 if cell.requests == 1 else 2 if cell.requests <= 4 else 1) for cell in cells]
    jobs = [Job(cell, count, known.get(described(cell))) for cell, count in zip(cells, runs, strict=True)]
    with ProcessPoolExecutor(workers) as pool:
        results = list(track(pool.map(play, jobs), "cells", total=len(jobs), console=Console(stderr=True)))
    show(results)
    if output is not None:
        write(results, seeds, output)


def earlier(report: Path) -> dict[str, Ratios]:
    """What a report says of the policy as it was, by cell."""
    made = json.loads(report.read_text(encoding="utf-8"))
    return {
        cell["cell"]: {name: ratio for name, ratio in cell.items() if name.startswith("before / ")}
        for cell in made["cells"]
    }


def described(cell: Cell) -> str:
    """A line."""
    busy = f", {cell.neighbour.name}" if cell.neighbour else ""
    return f"{cell.surface.name}, {cell.requests} x {cell.context} tokens, {cell.load.name}{busy}"


def missed(result: Result) -> list[str]:
    """What the cell does not reach."""
    return [name for name, least in LEAST.items() if result.ratios[name] < least]


def means(results: list[Result]) -> dict[str, float]:
    """Over cells, of each ratio."""
    names = {name: None for result in results for name in result.ratios}
    return {name: float(np.mean([r.ratios[name] for r in results if name in r.ratios])) for name in names}


def show(results: list[Result]) -> None:
    """The cells that miss something, and a summary."""
    console, table = Console(), Table("cell", "best", *LEAST, "auto / oracle", "before / best fixed")
    for result in results:
        if missed(result):
            figures = [result.ratios.get(name) for name in (*LEAST, "auto / oracle", "before / best fixed")]
            cells = ("" if figure is None else f"{figure:.3f}" for figure in figures)
            table.add_row(described(result.cell), str(result.best), *cells)
    console.print(table)
    for name, figure in means(results).items():
        worst = min(result.ratios.get(name, np.inf) for result in results)
        console.print(f"{name:32s} mean {figure:.3f}   worst cell {worst:.3f}")
    console.print(f"{sum(not missed(result) for result in results)} of {len(results)} cells reach all of {LEAST}")


def write(results: list[Result], seeds: int, output: Path) -> None:
    """The JSON, and a picture beside it."""
    report = {
        "made": {"commit": commit(), "at": now(), "steps": STEPS, "seeds": seeds},
        "least": LEAST,
        "means": means(results),
        "cells": [
            {"cell": described(r.cell), "best fixed width": r.best, **{k: round(v, 4) for k, v in r.ratios.items()}}
            for r in results
        ],
    }
    output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    draw(results, output.with_suffix(".svg"))


def draw(results: list[Result], path: Path) -> None:
    """Each cell a dot: the policy over the best fixed width, now and before; sorted."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for ax, name in zip(axes, ("best fixed, 100 steps", "best fixed"), strict=True):
        for who, colour in (("before", "#c44"), ("auto", "#26a")):
            ax.plot(sorted(r.ratios[f"{who} / {name}"] for r in results), color=colour, label=f"{who} / {name}")
        ax.axhline(LEAST[f"auto / {name}"], color="#888", linestyle=":")
        ax.set(xlabel="cells, sorted", ylim=(0.7, 1.3))
        ax.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    typer.run(main)
