"""Tokens per second with a constant number of requests in flight, in process: off, a fixed width and `auto`, in turns.

    python -m benchmarks.steady [--concurrency 1,2,4,8,16,32,64] [--ways off,fixed,auto] [--rounds 10] [--steps 100]
    python -m benchmarks.steady --burst --rounds 3      # all requests start together

The next request starts as soon as one ends, as at a server: answers of 32 to 128 tokens (greedy, the end of sequence
ignored), so that requests do not stay in step. Prefill is included, prefix reuse is off. All ways run at once, a step
of each in turn. The first round is not counted; a way's speed is all its tokens over all its seconds.

With `--burst` all requests start together and each makes exactly 96 tokens, so every way does the same work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from benchmarks.turns import ANSWERS, in_turns, show, summary, write_report
from dflash_serve import LLM, SamplingParams
from dflash_serve.answers.engine import RequestOutput
from dflash_serve.speculation.policy import FixedWidth
from dflash_serve.speculation.statistics import total
from dflash_torch.engine import EmbeddedEngine
from dflash_torch.scheduler import Scheduler
from dflash_torch.speculator import Speculator
from tests.support.prompts import word_problems

SHORTEST = 8
"""Least mean number of steps of an answer: decides how many prompts are needed."""


def main(
    concurrency: Annotated[str, typer.Option(help="Requests in flight, comma-separated.")] = "1,2,4,8,16,32,64",
    ways: Annotated[str, typer.Option(help="Ways, comma-separated: off, fixed, auto.")] = "off,fixed,auto",
    rounds: Annotated[int, typer.Option(help="Rounds that count.")] = 10,
    steps: Annotated[int, typer.Option(help="Steps of every way in a round.")] = 100,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto.")] = "auto",
    burst: Annotated[bool, typer.Option("--burst", help="Start all requests together, 96 tokens each.")] = False,
    target: Annotated[str, typer.Option(help="Target.")] = "smollm2",
    drafter: Annotated[str, typer.Option(help="Drafter.")] = "smollm2",
    max_model_len: Annotated[int, typer.Option(help="Longest prompt with its answer, in tokens.")] = 1024,
    output: Annotated[Path | None, typer.Option(help="File for the JSON.")] = None,
) -> None:
    """Measure all ways side by side."""
    sizes = [int(size) for size in concurrency.split(",")]
    tokens = 96 if burst else ANSWERS[1]
    limits = {"max_batch_size": max(sizes), "max_model_len": max_model_len}
    bench = Bench(target, drafter, ways.split(","), tokens=tokens, dtype=dtype, **limits)
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


class Bench:
    """One engine for each way, all on the same weights."""

    def __init__(
        self, target: str, drafter: str, ways: list[str], *, tokens: int, dtype: str = "auto", **limits: int
    ) -> None:
        llm = LLM(target, drafter, dtype=dtype, **limits)
        assert isinstance(llm.engine, EmbeddedEngine)
        full, block_size = llm.engine, llm.engine.block_size
        assert block_size is not None
        self.tokens, self.dtype = tokens, full.dtype
        full.scheduler.cache_manager.reuse = False  # every round has the same prompts
        widths = {"off": 1, "fixed": block_size}
        self.engines = {way: full if way == "auto" else apart(full, widths[way]) for way in ways}
        self.prompts = [full.tokenize(prompt) for prompt in word_problems(20)]

    def round(self, size: int, number: int) -> dict[str, dict[str, Any]]:
        """Each way once, on the same `size` prompts."""
        prompts = [self.prompts[n % len(self.prompts)] for n in range(size)]
        params = [SamplingParams(temperature=0, max_tokens=self.tokens, ignore_eos=True)] * size
        streams = {way: engine.stream(prompts, params) for way, engine in self.engines.items()}
        turns = in_turns(streams, number)
        return {way: self._figures(stream.outputs(), turns[way].seconds) for way, stream in streams.items()}

    def _figures(self, outputs: list[RequestOutput], seconds: float) -> dict[str, Any]:
        tokens = sum(len(output.token_ids) for output in outputs)
        statistics = total(output.statistics for output in outputs)
        return {
            "tokens_per_second": tokens / seconds,
            "acceptance_length": statistics.acceptance_length,
            "tokens_per_step": statistics.tokens_per_step,
        }


def apart(full: EmbeddedEngine, width: int) -> EmbeddedEngine:
    """An engine of the same weights with K/V caches of its own: requests of all ways are in flight at once."""
    like, speculator = full.scheduler, None
    limits = {"max_batch_size": like.cache.entries, "capacity": like.capacity}
    if width > 1:
        assert like.speculator is not None
        speculator = Speculator(like.speculator.drafter, like.target, block_size=width, **limits, cache=None)
    scheduler = Scheduler(like.target, speculator, FixedWidth(width), **limits, reuse_prefixes=False, shared=None)
    scheduler.prepare()
    return EmbeddedEngine(scheduler, full.tokenizer)


def bursts(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Medians of speeds, and of the rounds' own ratios."""
    speeds = [{way: figures["tokens_per_second"] for way, figures in measured.items()} for measured in rounds]
    ways = list(speeds[0])
    pairs = {"auto_over_better": {"off", "fixed"}, "auto_over_off": {"off"}}
    ratios = {
        name: median(speed["auto"] / max(speed[other] for other in others) for speed in speeds)
        for name, others in pairs.items()
        if {"auto", *others} <= set(ways)
    }
    last = {way: rounds[-1][way] for way in ("fixed", "auto") if way in ways}
    return {
        "tokens_per_second": {way: median(speed[way] for speed in speeds) for way in ways},
        "all_rounds": {way: [speed[way] for speed in speeds] for way in ways},
        **ratios,
        "acceptance_length": {way: figures["acceptance_length"] for way, figures in last.items()},
        "tokens_per_step": {way: figures["tokens_per_step"] for way, figures in last.items()},
    }


if __name__ == "__main__":
    typer.run(main)
