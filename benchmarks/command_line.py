"""CPU time of `--help`, `--version` and `serve --help`, compared with `python -c pass` in turns.

    python -m benchmarks.command_line --rounds 40 --earlier ../at-96ef23e3 --output benchmarks/results/command-line.json

A busy machine slows all commands of a round alike, so a ratio is taken in each round. Reported are medians, with 95 %
intervals by the order statistics of the rounds. Before the first round, each command runs once: Python compiles then.
"""

from __future__ import annotations

import os
import subprocess
import sys
from math import comb
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from typing import Annotated, NamedTuple

import typer

from dflash_serve.common.provenance import environment, versions
from dflash_serve.common.reports import write_json

ROOT = Path(__file__).parents[1]
BASE = ("-c", "pass")
ASKED = {name: ("-m", "dflash_serve", *name.split()) for name in ("--help", "--version", "serve --help")}
COVERED = 0.95


class Interval(NamedTuple):
    """A median, and the interval that has the true one with a probability of at least 95 %."""

    median: float
    least: float
    most: float


def interval(values: list[float]) -> Interval:
    """The median of independent values, whatever their distribution; needs six or more."""
    count, ordered, outside, rank = len(values), sorted(values), 0.0, 0
    while (outside := outside + 2 * comb(count, rank) / 2**count) <= 1 - COVERED:
        rank += 1
    return Interval(median(values), ordered[rank - 1], ordered[count - rank])


def cpu_seconds(words: tuple[str, ...], checkout: Path) -> float:
    """CPU time of one run of Python, user and system."""
    paths = (checkout, checkout / "backends", checkout / "engines")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    before = getrusage(RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], cwd=checkout, env=env, check=True, stdout=subprocess.DEVNULL)
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(
    rounds: Annotated[int, typer.Option(help="Runs of each command.", min=6)] = 40,
    earlier: Annotated[Path | None, typer.Option(help="Checkout of an earlier commit to compare with.")] = None,
    output: Annotated[Path | None, typer.Option(help="File for the result, JSON.")] = None,
) -> None:
    """Measures, prints, and writes the result."""
    ways = {"pass": (BASE, ROOT), **{name: (words, ROOT) for name, words in ASKED.items()}}
    if earlier is not None:
        ways |= {f"earlier {name}": (words, earlier.resolve()) for name, words in ASKED.items()}
    for words, checkout in ways.values():
        cpu_seconds(words, checkout)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        order = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
        for name in order:
            seconds[name].append(cpu_seconds(*ways[name]))
    others = [name for name in ways if name != "pass"]
    over = {f"{name} / pass": (name, "pass") for name in others}
    over |= {f"{name} / earlier {name}": (name, f"earlier {name}") for name in ASKED if earlier is not None}
    ratios = {
        title: interval([one / other for one, other in zip(seconds[top], seconds[below], strict=True)])
        for title, (top, below) in over.items()
    }
    for title, found in ratios.items():
        typer.echo(f"{title}: {found.median:.2f} ({found.least:.2f} to {found.most:.2f})")
    if output is not None:
        report = {name: interval(each)._asdict() for name, each in seconds.items()}
        named = {title: found._asdict() for title, found in ratios.items()}
        measured = {"rounds": rounds, "cpu_seconds": report, "ratios": named}
        seen = environment().model_dump()
        write_json(output, {"environment": seen, "versions": versions("typer", "pydantic"), **measured})


if __name__ == "__main__":
    typer.run(main)
