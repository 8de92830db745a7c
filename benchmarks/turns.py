"""Engines that answer at once in one process, a step of each in turn: a busy spell of the machine slows all alike."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from time import perf_counter

from dflash_serve.backend import Stream


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
