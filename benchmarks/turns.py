"""Ways that take turns, so that a busy spell of the machine slows all alike: running them, and what it came to."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from dflash_serve.backend import Stream
from dflash_serve.bench.settings import AUTO, OFF


class Turn(NamedTuple):
    """What one way did while it ran."""

    tokens: float
    seconds: float


def in_turns(streams: Mapping[str, Stream], seed: int) -> dict[str, float]:
    """Runs streams of as many requests each to their ends, and returns the seconds of each.

    A chunk of each in turn, in another order every time: a step brings every request one, so engines step in turn, and
    none always comes behind the one whose steps empty the caches. `seed` decides the orders.
    """
    seconds, running, luck = dict.fromkeys(streams, 0.0), list(streams), Random(seed)
    while running:
        luck.shuffle(running)
        for name in running.copy():
            start = perf_counter()
            if next(streams[name], None) is None:
                running.remove(name)
            seconds[name] += perf_counter() - start
    return seconds


def summary(found: dict[str, list[Turn]]) -> dict[str, Any]:
    """Speeds; auto beside off and beside the better of the others, with the spread that turns' own scatter gives."""
    turns = {way: np.array(each) for way, each in found.items()}
    speed = {way: _speed(each) for way, each in turns.items()}
    others = {way: figure for way, figure in speed.items() if way != AUTO}
    better = max(others, key=lambda way: others[way]) if others else None
    ratios = {}
    if AUTO in turns:
        compared = {"auto_over_better": better, "auto_over_off": OFF if OFF in turns else None}
        ratios = {name: _ratio(turns[AUTO], turns[way]) for name, way in compared.items() if way}
    return {
        "tokens_per_second": speed,
        "better": better,
        **ratios,
        "all_turns": {way: [list(turn) for turn in each] for way, each in found.items()},
    }


def _speed(turns: Any) -> float:
    tokens, seconds = turns.sum(0)
    return float(tokens / seconds)


def _ratio(one: Any, other: Any) -> dict[str, float]:
    """Of two ways' speeds, and its spread: of a thousand draws of their turns, with those of one moment together."""
    chance = np.random.default_rng(0)
    draws = [chance.integers(0, len(one), len(one)) for _ in range(1000)]
    spread = float(np.std([_speed(one[draw]) / _speed(other[draw]) for draw in draws]))
    return {"ratio": _speed(one) / _speed(other), "spread": spread}


def show(results: list[dict[str, Any]], title: str) -> None:
    """A row a number of users."""
    ways = list(results[0]["tokens_per_second"])
    table = Table("users", *ways, "auto / better", "auto / off", title=title)
    for row in results:
        speeds = [f"{row['tokens_per_second'][way]:.1f}" for way in ways]
        ratios = [row.get(name) for name in ("auto_over_better", "auto_over_off")]
        shown = [f"{ratio['ratio']:.3f} ± {ratio['spread']:.3f}" if ratio else "" for ratio in ratios]
        table.add_row(str(row["users"]), *speeds, *shown)
    Console().print(table)
