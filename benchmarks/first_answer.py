"""The first answer after a start: speculation off, every fixed width, and `width: auto` from a cold start, in turns.

    python -m benchmarks.first_answer [--prompts 4] [--rounds 3] [--output benchmarks/results/first-answer.json]

For each prompt and round all ways answer at once, each with an engine of its own over the same weights, and take their
steps in turns: a busy spell of a tenth of a second slows all alike. `auto` begins every time with what a fresh process
has: the costs that were measured at start and the survival that training recorded. An answer's time is that of its own
steps, prefill included; figures are medians over rounds.

Beside which fixed width? Of seven that are nearly as fast the one with the highest median is the luckiest one of this
machine's noise. So for each round the best fixed width is that of all other rounds, and the ratio is this round's. And
which width suits an answer of some thirty steps best is luck of the answer: which tokens happen to begin its blocks. So
of each task some answers are taken, each after a start of its own, beside the width that is best for all of them; what
one answer's own best width would have been is reported, too.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

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
    prompts: Annotated[int, typer.Option(help="Prompts of every task.")] = 4,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds, at least 2; the median counts.", min=2)] = 3,
    tokens: Annotated[int, typer.Option(help="Longest answer.")] = 160,
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    """Measure all ways side by side."""
    bench, tasks = Bench(tokens), asked(prompts)
    for _ in range(2):  # warm-up, not counted
        bench.round(tasks["word problems"][0], 0)
    results = []
    for name, chosen in tasks.items():
        turns = track(range(rounds), name, console=Console(stderr=True))
        measured = [[bench.round(prompt, turn) for prompt in chosen] for turn in turns]
        results.append(
            {
                "task": name,
                "prompts": len(chosen),
                **beside_best([together(answers) for answers in measured]),
                "by_answer": [
                    beside_best([together([each]) for each in answers]) for answers in zip(*measured, strict=True)
                ],
            }
        )
    report = {
        "environment": measured_on(),
        "versions": versions("torch", "dflash-serve"),
        "load": {"target": "smollm2", "drafter": "smollm2", "tokens": tokens, "prompts": prompts, "rounds": rounds},
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


def together(answers: list[dict[str, Answer]]) -> dict[str, float]:
    """Tokens per second of each way, over answers."""
    return {
        way: sum(answer[way].tokens for answer in answers) / sum(answer[way].seconds for answer in answers)
        for way in answers[0]
    }


def beside_best(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over rounds, and `auto` beside the best fixed width."""
    speed = {way: median(each[way] for each in rounds) for way in rounds[0]}
    best, ratios = max(fixed_ways(speed), key=lambda way: speed[way]), over_best(rounds)
    return {"tokens_per_second": speed, "best": best, "auto_over_best": median(ratios), "all_rounds": ratios}


def asked(count: int) -> dict[str, list[Prompt]]:
    """The demo's prompt, and the first ones of every task."""
    demo: Prompt = [{"role": "user", "content": LENA}]
    return {
        "make demo": [demo],
        "word problems": list(word_problems(count)),
        "HumanEval": list(human_eval(count)),
        "chat": list(chat(count)),
    }


class Answer(NamedTuple):
    """What one way came to."""

    tokens: int
    seconds: float


class Bench:
    """The pair, loaded once, and an engine for each way."""

    def __init__(self, tokens: int) -> None:
        engine = LLM("smollm2", "smollm2", max_batch_size=1, max_model_len=1024).engine
        assert isinstance(engine, EmbeddedEngine)
        assert engine.block_size is not None
        policy, self.block_size = engine.scheduler.policy, engine.block_size
        assert isinstance(policy, AutoWidth)
        self.costs, self.survival = policy.times.measured, recorded_survival(drafter_folder("smollm2"))
        self.params = SamplingParams(temperature=0, max_tokens=tokens)
        widths = range(2, self.block_size + 1)
        fixed = {f"width {width}": engine.fixed(width) for width in widths}
        self.ways = {"off": engine.plain(), **fixed, "auto": engine}
        for each in self.ways.values():
            each.scheduler.cache_manager.reuse = False  # every round has the same prompts

    def round(self, prompt: Prompt, number: int) -> dict[str, Answer]:
        """An answer each way, all of the same tokens; rounds have the ways in another order."""
        self.ways["auto"].scheduler.policy = AutoWidth(self.costs, self.block_size, known_survival=self.survival)
        streams = {way: engine.stream([prompt], [self.params]) for way, engine in self.ways.items()}
        seconds = in_turns(streams, number)
        answers = {way: stream.outputs()[0].token_ids for way, stream in streams.items()}
        assert len(set(map(tuple, answers.values()))) == 1, "widths changed the answer"
        return {way: Answer(len(answers[way]), seconds[way]) for way in streams}


def show(results: list[dict[str, Any]]) -> None:
    """A table: tokens per second."""
    ways = list(results[0]["tokens_per_second"])
    table = Table("task", *ways, "auto / best", "of one answer")
    for row in results:
        figures = (f"{row['tokens_per_second'][way]:.1f}" for way in ways)
        own = " ".join(f"{each['auto_over_best']:.3f}" for each in row["by_answer"])
        table.add_row(row["task"], *figures, f"{row['auto_over_best']:.3f} ({row['best']})", own)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
