"""The first answer after a start: speculation off, every fixed width, and `width: auto` from a cold start, in turns.

    python -m benchmarks.first_answer [--rounds 9] [--output benchmarks/results/first-answer.json]

For each prompt and round all ways answer at once, each with an engine of its own over the same weights, and take their
steps in turns: a busy spell of a tenth of a second slows all alike. `auto` begins every time with what a fresh process
has: the costs that were measured at start and the survival that training recorded. An answer's time is that of its own
steps, prefill included; figures are medians over rounds.

Beside which fixed width? Of seven that are nearly as fast the one with the highest median is the luckiest one of this
machine's noise. So for each round the best fixed width is that of all other rounds, and the ratio is this round's.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.decoding import measured_on, write_report
from benchmarks.turns import in_turns
from dflash_serve import LLM, SamplingParams
from dflash_serve.backend import Prompt
from dflash_serve.checkpoint.source import drafter_folder, recorded_survival
from dflash_serve.common.provenance import versions
from dflash_serve.speculation.width import AutoWidth
from dflash_torch.engine import EmbeddedEngine
from tests.support.prompts import chat, human_eval, word_problems

LENA = (
    "Lena reads 15 pages before school and 25 pages after dinner every day. Her book has 320 pages. "
    "How many days does she need to finish it?"
)


def main(
    rounds: Annotated[int, typer.Option(help="Interleaved rounds, at least 2; the median counts.", min=2)] = 9,
    tokens: Annotated[int, typer.Option(help="Longest answer.")] = 160,
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    """Measure all ways side by side."""
    bench = Bench(tokens)
    for _ in range(2):  # warm-up, not counted
        bench.round(prompts()["word problem"], 0)
    results = []
    for name, prompt in prompts().items():
        measured = [bench.round(prompt, number) for number in track(range(rounds), name, console=Console(stderr=True))]
        speed = {way: median(each[way] for each in measured) for way in bench.ways}
        best = max(fixed_ways(speed), key=lambda way: speed[way])
        ratios = over_best(measured)
        found = {"best": best, "auto_over_best": median(ratios), "all_rounds": ratios}
        results.append({"prompt": name, "tokens_per_second": speed, **found})
    report = {
        "environment": measured_on(),
        "versions": versions("torch", "dflash-serve"),
        "load": {"target": "smollm2", "drafter": "smollm2", "tokens": tokens, "rounds": rounds},
        "results": results,
    }
    show(results)
    write_report(report, output)


def fixed_ways(speed: dict[str, float]) -> list[str]:
    """All but `auto`."""
    return [way for way in speed if way != "auto"]


def over_best(rounds: list[dict[str, float]]) -> list[float]:
    """`auto` over the best fixed width, round by round: over that of all others."""
    found = []
    for each in rounds:
        others = {way: median(other[way] for other in rounds if other is not each) for way in fixed_ways(each)}
        found.append(each["auto"] / each[max(others, key=lambda way: others[way])])
    return found


def prompts() -> dict[str, Prompt]:
    """The demo's, and the first of every task."""
    return {
        "make demo": [{"role": "user", "content": LENA}],
        "word problem": word_problems(1)[0],
        "HumanEval": human_eval(1)[0],
        "chat": chat(1)[0],
    }


class Bench:
    """The pair, loaded once, and an engine for each way."""

    def __init__(self, tokens: int) -> None:
        engine = LLM("smollm2", "smollm2", max_batch_size=1, max_model_len=1024).engine
        assert isinstance(engine, EmbeddedEngine)
        assert engine.block_size is not None
        policy, self.block_size = engine.scheduler.policy, engine.block_size
        assert isinstance(policy, AutoWidth)
        self.costs, self.survival = policy.costs.measured, recorded_survival(drafter_folder("smollm2"))
        self.params = SamplingParams(temperature=0, max_tokens=tokens)
        widths = range(2, self.block_size + 1)
        fixed = {f"width {width}": engine.fixed(width) for width in widths}
        self.ways = {"off": engine.plain(), **fixed, "auto": engine}
        for each in self.ways.values():
            each.scheduler.cache_manager.reuse = False  # every round has the same prompts

    def round(self, prompt: Prompt, number: int) -> dict[str, float]:
        """Tokens per second of each way, which must all give the same tokens; rounds have them in another order."""
        self.ways["auto"].scheduler.policy = AutoWidth(self.costs, self.block_size, known_survival=self.survival)
        streams = {way: engine.stream([prompt], [self.params]) for way, engine in self.ways.items()}
        seconds = in_turns(streams, number)
        answers = {way: stream.outputs()[0].token_ids for way, stream in streams.items()}
        assert len(set(map(tuple, answers.values()))) == 1, "widths changed the answer"
        return {way: len(answers[way]) / seconds[way] for way in streams}


def show(results: list[dict[str, Any]]) -> None:
    """A table: tokens per second."""
    ways = list(results[0]["tokens_per_second"])
    table = Table("prompt", *ways, "auto / best")
    for row in results:
        figures = (f"{row['tokens_per_second'][way]:.1f}" for way in ways)
        table.add_row(row["prompt"], *figures, f"{row['auto_over_best']:.3f} ({row['best']})")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
