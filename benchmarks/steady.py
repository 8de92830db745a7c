"""Tokens per second with so many requests in flight all the time, in process: off, a fixed width, `auto` in turns.

    python -m benchmarks.steady [--concurrency 1,2,4,8,16,32,64] [--ways off,fixed,auto] [--rounds 10] [--steps 100]

As at a server, whoever has an answer asks again at once: answers of 32 to 128 tokens (greedy, the end of sequence
ignored), so that requests do not stay in step; prefill is included, prefix reuse is off. `benchmarks.throughput` starts
as many together and waits for the last of them, so drafts, of which some requests gain more than others, leave its last
steps half empty. All ways run at once, a step of each in turn. The first round is not counted; a way's speed is all its
tokens over all its seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.progress import track

from benchmarks.decoding import measured_on, write_report
from benchmarks.served import ANSWERS
from benchmarks.throughput import WAYS, Bench
from benchmarks.turns import Turn, show, summary
from dflash_serve import SamplingParams
from dflash_serve.backend import Stream
from dflash_serve.common.provenance import versions
from dflash_torch.engine import EmbeddedEngine

SHORTEST = 8
"""Steps of an answer, at least, in the mean: of that many prompts none runs out."""


def main(
    concurrency: Annotated[str, typer.Option(help="Requests in flight, comma-separated.")] = "1,2,4,8,16,32,64",
    ways: Annotated[str, typer.Option(help="Which of off, fixed and auto.")] = "off,fixed,auto",
    rounds: Annotated[int, typer.Option(help="Rounds that count.")] = 10,
    steps: Annotated[int, typer.Option(help="Of every way in a round.")] = 100,
    target: Annotated[str, typer.Option(help="Hub id, folder, or the bundled smollm2.")] = "smollm2",
    drafter: Annotated[str, typer.Option(help="Likewise.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto.")] = "auto",
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    """Measure the ways side by side."""
    sizes = [int(size) for size in concurrency.split(",")]
    chosen = [way for way in WAYS if way in ways.split(",") and way != "hf"]
    bench = Bench(target, drafter, chosen, tokens=ANSWERS[1], most=max(sizes), dtype=dtype)
    results = [load(bench, size, rounds, steps) for size in sizes]
    report = {
        "environment": measured_on(),
        "versions": versions("torch", "dflash-serve"),
        "load": {"target": target, "drafter": drafter, "dtype": bench.dtype, "rounds": rounds, "steps": steps},
        "results": results,
    }
    show(results, "tokens/s in process, in turns")
    write_report(report, output)


def load(bench: Bench, size: int, rounds: int, steps: int) -> dict[str, Any]:
    """All rounds of `size` requests in flight."""
    count, luck = size * (2 + (1 + rounds) * steps // SHORTEST), Random(size)
    prompts = [luck.choice(bench.prompts) for _ in range(count)]
    params = [SamplingParams(temperature=0, max_tokens=luck.randint(*ANSWERS), ignore_eos=True) for _ in prompts]
    with entries(bench.engines.values(), size):
        streams = {way: engine.stream(prompts, params) for way, engine in bench.engines.items()}
        run(streams, size * steps, seed=0)
        measured = [run(streams, size * steps, seed=1 + each) for each in track(range(rounds), f"{size} in flight")]
        for stream in streams.values():
            stream.close()
    return {"users": size, **summary({way: [turn[way] for turn in measured] for way in streams})}


@contextmanager
def entries(engines: Iterable[EmbeddedEngine], size: int) -> Iterator[None]:
    """Engines that run no more than `size` requests at once meanwhile."""
    free = [engine.scheduler.cache_manager.free for engine in engines]
    withheld = [each[size:] for each in free]
    for each in free:
        del each[size:]
    try:
        yield
    finally:
        for each, rest in zip(free, withheld, strict=True):
            each += rest


def run(streams: Mapping[str, Stream], chunks: int, seed: int) -> dict[str, Turn]:
    """So many chunks of every stream, one of each in turn, in another order every time."""
    tokens, seconds, order, luck = dict.fromkeys(streams, 0), dict.fromkeys(streams, 0.0), list(streams), Random(seed)
    for _ in range(chunks):
        luck.shuffle(order)
        for way in order:
            start = perf_counter()
            chunk = next(streams[way])
            seconds[way] += perf_counter() - start
            tokens[way] += len(chunk.token_ids)
    return {way: Turn(tokens[way], seconds[way]) for way in streams}


if __name__ == "__main__":
    typer.run(main)
