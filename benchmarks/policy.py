"""The width policy against what hindsight would have chosen, in a simulator: no model, no waiting.

    python -m benchmarks.policy [--seeds 4] [--part all] [--output benchmarks/results/policy.json]
    python -m benchmarks.policy --sensitivity --part tuned --seeds 1

A situation is a cost surface (this project's bundled pair on two CPU cores, in the embedded engine and in SGLang's
server, where all requests of a step have one width; Qwen3-8B on three GPUs), a number of requests, a context length and
a kind of requests. Each run plays on the same luck: every fixed width; the policy, from a cold start with costs that
are some 20 % off; and an oracle that knows true survival and true costs. Figures are ratios of tokens per second, means
over seeds: of the first 100 steps, and of 500.

The policy's constants are chosen on one half of the situations (`tuned`) and judged on the other one (`held out`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.simulator import STEPS, Cell, Load, Neighbour, Oracle, Synthetic, replays, run, surfaces
from dflash_serve.common.provenance import commit, now
from dflash_serve.common.reports import write_json
from dflash_serve.speculation import width
from dflash_serve.speculation.costs import CostModel, Floats
from dflash_serve.speculation.policy import FixedWidth, WidthPolicy
from dflash_serve.speculation.width import AutoWidth

NEVER = 1.0  # the acceptance length of a drafter that is never right
SPLIT_SEED = 0
LEAST = {"auto / best fixed, 100 steps": 0.95, "auto / best fixed": 0.97, "auto / off": 0.99}
"""Goals of every situation."""
Make = Callable[[int], WidthPolicy | Oracle]
Ratios = dict[str, float]


def grid() -> list[Cell]:
    """All situations."""
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


def halves(cells: Sequence[Cell]) -> dict[str, str]:
    """The half of each situation, tuned or held out, by a fixed seed."""
    order = np.random.default_rng(SPLIT_SEED).permutation(len(cells))
    tuned = set(order[: len(cells) // 2].tolist())
    return {described(cell): "tuned" if place in tuned else "held out" for place, cell in enumerate(cells)}


@dataclass(frozen=True)
class Result:
    """Ratios of one situation."""

    cell: Cell
    best: int
    """The best fixed width in hindsight, over all steps."""
    ratios: Ratios


@dataclass(frozen=True)
class Job:
    """A situation to play, with constants of the policy that are not its own."""

    cell: Cell
    seeds: int
    constants: tuple[tuple[str, float], ...] = ()
    own_time: bool = False
    """The policy's own CPU time counts, as if nothing ran meanwhile."""


def play(job: Job) -> Result:
    """Every policy in one situation."""
    cell, seeds = job.cell, job.seeds
    surface = cell.surface

    def mean(make: Make) -> Floats:
        return np.asarray(
            np.mean([run(cell, make(seed), seed, own_time=job.own_time) for seed in range(seeds)], axis=0)
        )

    def cost(seed: int) -> CostModel:
        return surface.measured(cell.requests, np.random.default_rng(seed + 77))

    widths = surface.widths or [each for each in (1, 2, 3, 4, 6, 8, 12, 16) if each <= surface.block_size]
    fixed = {each: mean(lambda _, each=each: FixedWidth(each)) for each in widths}  # type: ignore[misc]
    own = {name: getattr(width, name) for name, _ in job.constants}
    vars(width).update(job.constants)
    auto = mean(lambda seed: AutoWidth(cost(seed), surface.block_size, surface.widths))
    vars(width).update(own)
    best = np.max(list(fixed.values()), axis=0)
    ratios = {
        "auto / best fixed, 100 steps": auto[0] / best[0],
        "auto / best fixed": auto[1] / best[1],
        "auto / off": auto[1] / fixed[1][1],
    }
    if isinstance(cell.load, Synthetic):
        ratios["auto / oracle"] = auto[1] / mean(lambda _: Oracle(cell))[1]
    return Result(cell, max(fixed, key=lambda each: fixed[each][1]), {name: float(r) for name, r in ratios.items()})


def main(
    seeds: Annotated[int, typer.Option(help="Runs of every situation; more where there are few requests.")] = 4,
    part: Annotated[str, typer.Option(help="all, tuned or held out.")] = "all",
    only: Annotated[str, typer.Option(help="Situations whose description has this in it.")] = "",
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
    workers: Annotated[int, typer.Option(help="Processes.")] = 2,
    own_time: Annotated[bool, typer.Option(help="Add the CPU time that the policy takes on this machine.")] = False,
    sensitivity: Annotated[bool, typer.Option(help="Half and twice each constant of the policy.")] = False,
) -> None:
    """Play every situation."""
    whose = halves(grid())
    cells = [cell for cell in grid() if part in ("all", whose[described(cell)]) and only in described(cell)]
    runs = [seeds * (4 if cell.requests == 1 else 2 if cell.requests <= 4 else 1) for cell in cells]
    with ProcessPoolExecutor(workers) as pool:

        def played(constants: tuple[tuple[str, float], ...] = ()) -> list[Result]:
            jobs = [Job(cell, count, constants, own_time) for cell, count in zip(cells, runs, strict=True)]
            return list(track(pool.map(play, jobs), "situations", total=len(jobs), console=Console(stderr=True)))

        results = played()
        show(results, whose)
        if sensitivity:
            for name, value in half_and_twice():
                changed = means(played(((name, value),)))
                differences = (f"{changed[ratio] - figure:+.4f}" for ratio, figure in means(results).items())
                print(f"{name:16s} {value:<7g}", *differences, flush=True)
    if output is not None:
        write(results, whose, seeds, output)


def half_and_twice() -> Iterator[tuple[str, float]]:
    """Names of the policy's own constants with other values; a probability goes half the way to 1 instead of twice."""
    for name, value in vars(width).items():
        if name.isupper() and isinstance(value, int | float) and name != "NODES":
            yield name, type(value)(value / 2)
            yield name, (1 + value) / 2 if name == "PRIOR" else 2 * value


def described(cell: Cell) -> str:
    """A line."""
    busy = f", {cell.neighbour.name}" if cell.neighbour else ""
    return f"{cell.surface.name}, {cell.requests} x {cell.context} tokens, {cell.load.name}{busy}"


def missed(result: Result) -> list[str]:
    """Goals that the situation does not reach."""
    return [name for name, least in LEAST.items() if result.ratios[name] < least]


def means(results: Sequence[Result]) -> dict[str, float]:
    """Mean of each ratio over situations."""
    names = {name: None for result in results for name in result.ratios}
    return {name: float(np.mean([r.ratios[name] for r in results if name in r.ratios])) for name in names}


def by_part(results: Sequence[Result], whose: dict[str, str]) -> dict[str, list[Result]]:
    """Results of all situations and of each half."""
    found = {part: [r for r in results if whose[described(r.cell)] == part] for part in ("tuned", "held out")}
    return {"all": list(results), **{part: some for part, some in found.items() if some}}


def show(results: Sequence[Result], whose: dict[str, str]) -> None:
    """The situations that miss a goal, and a summary."""
    console, table = Console(), Table("situation", "half", "best", *LEAST, "auto / oracle")
    for result in results:
        if missed(result):
            figures = [result.ratios.get(name) for name in (*LEAST, "auto / oracle")]
            cells = ("" if figure is None else f"{figure:.3f}" for figure in figures)
            table.add_row(described(result.cell), whose[described(result.cell)], str(result.best), *cells)
    console.print(table)
    for part, some in by_part(results, whose).items():
        for name, figure in means(some).items():
            worst = min(result.ratios.get(name, np.inf) for result in some)
            console.print(f"{part:9s} {name:30s} mean {figure:.4f}   worst situation {worst:.3f}")
        console.print(
            f"{part:9s} {sum(not missed(each) for each in some)} of {len(some)} situations reach all of {LEAST}"
        )


def write(results: Sequence[Result], whose: dict[str, str], seeds: int, output: Path) -> None:
    """The JSON."""
    summary = {
        part: {"situations": len(some), "reach all goals": sum(not missed(each) for each in some), "means": means(some)}
        for part, some in by_part(results, whose).items()
    }
    rows = [
        {
            "cell": described(r.cell),
            "half": whose[described(r.cell)],
            "best fixed width": r.best,
            **{name: round(ratio, 4) for name, ratio in r.ratios.items()},
        }
        for r in results
    ]
    made = {"commit": commit(), "at": now(), "steps": STEPS, "seeds": seeds, "split seed": SPLIT_SEED}
    report = {"made": made, "least": LEAST, "halves": summary, "cells": rows}
    write_json(output, report)


if __name__ == "__main__":
    typer.run(main)
