"""Tokens per second with a constant number of requests in flight, in process: off, a fixed width and `auto`, in turns.

    python -m benchmarks.steady [--concurrency 1,2,4,8,16,32,64] [--ways off,fixed,auto] [--rounds 10] [--steps 100]
    python -m benchmarks.steady --burst --rounds 3      # all requests start together: see benchmarks.throughput

The next request starts as soon as one ends, as at a server: answers of 32 to 128 tokens (greedy, the end of sequence
ignored), so that requests do not stay in step. Prefill is included, prefix reuse is off. All ways run at once, a step
of each in turn. The first round is not counted; a way's speed is all its tokens over all its seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from benchmarks.throughput import Bench
from benchmarks.throughput import summary as bursts
from benchmarks.turns import ANSWERS, in_turns, show, summary, write_report
from dflash_serve import SamplingParams
from dflash_torch.engine import EmbeddedEngine

SHORTEST = 8
"""Least mean number of steps of an answer: decides how many prompts are needed."""


def main(
    concurrency: Annotated[str, typer.Option(help="Requests in flight, comma-separated.")] = "1,2,4,8,16,32,64",
    ways: Annotated[str, typer.Option(help="Ways, comma-separated: off, fixed, auto.")] = "off,fixed,auto",
    rounds: Annotated[int, typer.Option(help="Rounds that count.")] = 10,
    steps: Annotated[int, typer.Option(help="Steps of every way in a round.")] = 100,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto.")] = "auto",
    burst: Annotated[bool, typer.Option("--burst", help="Start all requests together, 96 tokens each.")] = False,
    output: Annotated[Path | None, typer.Option(help="File for the JSON.")] = None,
) -> None:
    """Measure all ways side by side, SmolLM2 with the bundled drafter."""
    sizes = [int(size) for size in concurrency.split(",")]
    tokens = 96 if burst else ANSWERS[1]
    bench = Bench("smollm2", "smollm2", ways.split(","), tokens=tokens, most=max(sizes), dtype=dtype)
    if burst:
        bench.round(min(sizes), 0)  # warm-up, not counted
        results = [{"concurrency": size, **bursts([bench.round(size, n) for n in range(rounds)])} for size in sizes]
    else:
        results = [load(bench, size, rounds, steps) for size in sizes]
    if burst:
        Console().print_json(data=[{name: row[name] for name in row if name != "all_rounds"} for row in results])
    else:
        show(results, "tokens/s in process, in turns")
    write_report({"dtype": bench.dtype, "rounds": rounds, "steps": steps, "burst": burst}, results, output)


def load(bench: Bench, size: int, rounds: int, steps: int) -> dict[str, Any]:
    """All rounds with `size` requests in flight."""
    count, chance = size * (2 + (1 + rounds) * steps // SHORTEST), Random(size)
    prompts = [chance.choice(bench.prompts) for _ in range(count)]
    params = [SamplingParams(temperature=0, max_tokens=chance.randint(*ANSWERS), ignore_eos=True) for _ in prompts]
    with limited(bench.engines.values(), size):
        streams = {way: engine.stream(prompts, params) for way, engine in bench.engines.items()}
        in_turns(streams, 0, size * steps)
        numbers = track(range(rounds), f"{size} in flight")
        measured = [in_turns(streams, 1 + number, size * steps) for number in numbers]
        for stream in streams.values():
            stream.close()
    return {"users": size, **summary({way: [turn[way] for turn in measured] for way in streams})}


@contextmanager
def limited(engines: Iterable[EmbeddedEngine], size: int) -> Iterator[None]:
    """Engines run at most `size` requests at once inside."""
    free = [engine.scheduler.cache_manager.free for engine in engines]
    withheld = [each[size:] for each in free]
    for each in free:
        del each[size:]
    try:
        yield
    finally:
        for each, others in zip(free, withheld, strict=True):
            each += others


if __name__ == "__main__":
    typer.run(main)
