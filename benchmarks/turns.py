"""Helpers of the benchmarks: ways of serving that run in turns, their speeds and ratios, and the report they write.

All ways run alternately, so a busy spell of the machine slows all of them alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from dflash_serve.answers.engine import Stream
from dflash_serve.bench.settings import AUTO, OFF
from dflash_serve.common.provenance import environment, versions
from dflash_serve.common.reports import write_json

ANSWERS = 32, 128
"""Tokens of the shortest and of the longest answer: requests should not stay in step."""


class Turn(NamedTuple):
    """Tokens that one way generated while it ran, and the seconds of that."""

    tokens: float
    seconds: float


def in_turns(streams: Mapping[str, Stream], seed: int, chunks: int | None = None) -> dict[str, Turn]:
    """Runs streams by a chunk of each in turn, `chunks` times or to their ends.

    The order changes with every turn, so that no way always runs after the one whose steps empty the caches. On a GPU a
    way runs all its chunks in one turn, then waits for the device: it may still run a step whose result is not read.
    """
    on_gpu = torch.cuda.is_available()
    tokens, seconds, running = dict.fromkeys(streams, 0), dict.fromkeys(streams, 0.0), list(streams)
    chance, turn = Random(seed), 0
    while running and turn != chunks:
        turn += 1
        chance.shuffle(running)
        for way in running.copy():
            start = perf_counter()
            found = list(islice(streams[way], chunks if on_gpu else 1))
            if on_gpu:
                torch.cuda.synchronize()
            seconds[way] += perf_counter() - start
            tokens[way] += sum(len(chunk.token_ids) for chunk in found)
            if not found or on_gpu:
                running.remove(way)
    return {way: Turn(tokens[way], seconds[way]) for way in streams}


def summary(found: dict[str, list[Turn]]) -> dict[str, Any]:
    """Speed of each way; `auto` over `off` and over the fastest other way, each with a bootstrap standard error."""
    turns = {way: np.array(each) for way, each in found.items()}
    speed = {way: _speed(each) for way, each in turns.items()}
    others = {way: figure for way, figure in speed.items() if way != AUTO}
    better = max(others, key=lambda way: others[way]) if others else None
    ratios = {}
    if AUTO in turns:
        compared = {"auto_over_better": better, "auto_over_off": OFF if OFF in turns else None}
        ratios = {name: _ratio(turns[AUTO], turns[way]) for name, way in compared.items() if way}
    all_turns = {way: [list(turn) for turn in each] for way, each in found.items()}
    return {"tokens_per_second": speed, "better": better, **ratios, "all_turns": all_turns}


def _speed(turns: Any) -> float:
    tokens, seconds = turns.sum(0)
    return float(tokens / seconds)


def _ratio(one: Any, other: Any) -> dict[str, float]:
    # Turns of the same moment are drawn together.
    chance = np.random.default_rng(0)
    draws = [chance.integers(0, len(one), len(one)) for _ in range(1000)]
    spread = float(np.std([_speed(one[draw]) / _speed(other[draw]) for draw in draws]))
    return {"ratio": _speed(one) / _speed(other), "spread": spread}


def show(results: list[dict[str, Any]], title: str) -> None:
    """Prints a row for each number of users."""
    ways = list(results[0]["tokens_per_second"])
    table = Table("users", *ways, "auto / better", "auto / off", title=title)
    for row in results:
        speeds = [f"{row['tokens_per_second'][way]:.1f}" for way in ways]
        ratios = [row.get(name) for name in ("auto_over_better", "auto_over_off")]
        shown = [f"{ratio['ratio']:.3f} ± {ratio['spread']:.3f}" if ratio else "" for ratio in ratios]
        table.add_row(str(row["users"]), *speeds, *shown)
    Console().print(table)


def write_report(load: Mapping[str, Any], results: list[Any], output: Path | None, **more: Any) -> None:
    """Writes load and results with the environment as JSON; `output` None = no file."""
    if output is not None:
        seen = {**environment().model_dump(), "threads": torch.get_num_threads()}
        peers = versions("dflash")  # z-lab's
        write_json(output, {"environment": seen, "versions": peers, "load": load, **more, "results": results})
