"""Decoding behind long prompts: speculation off, fixed widths and `width: auto` in turns, at each length of context.

    python -m benchmarks.long_context [--contexts 512,4096,8000,16000] [--rounds 3] [--output FILE]

A prompt is as many of HumanEval's functions as fit, then one to complete, another one every round; the functions before
it are computed once and reused. What is timed is decoding alone, from the first token of an answer to its last; all
ways answer at once, a step of each in turn. Figures are medians over rounds; `auto` is one policy that serves all of
them, as a server's does.

SmolLM2 was trained for 8,192 tokens. Beyond, its config is stretched: step costs are real there, what it says is not.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.decoding import measured_on, write_report
from benchmarks.turns import in_turns
from dflash_serve import LLM, SamplingParams
from dflash_serve.checkpoint.source import target_folder
from dflash_serve.common.provenance import versions
from dflash_serve.outputs import RequestOutput
from dflash_serve.speculation.statistics import total
from dflash_torch.engine import EmbeddedEngine
from tests.support.prompts import human_eval, user

WIDTHS = (2, 4, 8)
QUESTIONS = 8


class Decoded(NamedTuple):
    """An answer behind its first token."""

    tokens_per_second: float
    milliseconds_per_step: float
    acceptance_length: float | None


def main(
    contexts: Annotated[str, typer.Option(help="Prompt tokens, comma-separated.")] = "512,4096,8000,16000",
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; the median counts.")] = 3,
    tokens: Annotated[int, typer.Option(help="Tokens of every answer.")] = 128,
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    """Measure all ways side by side."""
    sizes = [int(size) for size in contexts.split(",")]
    with TemporaryDirectory() as folder:
        bench, results = Bench(stretched(Path(folder), max(sizes) + tokens), tokens), []
    for size in sizes:
        turns = track(range(rounds), f"{size} tokens", console=Console(stderr=True))
        results.append({"context": size, **summary([bench.round(size, turn) for turn in turns])})
    report = {
        "environment": measured_on(),
        "versions": versions("torch", "dflash-serve"),
        "load": {"target": "smollm2", "drafter": "smollm2", "tokens": tokens, "rounds": rounds, "dtype": bench.dtype},
        "results": results,
    }
    show(results)
    write_report(report, output)


class Bench:
    """The pair, loaded once."""

    def __init__(self, target: Path, tokens: int) -> None:
        engine = LLM(str(target), "smollm2", max_batch_size=1).engine
        assert isinstance(engine, EmbeddedEngine)
        self.tokenize, self.dtype = engine.tokenize, engine.dtype
        self.params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        functions = [message[0]["content"] for message in human_eval(160)]
        self.before, self.questions = "\n\n".join(functions[:-QUESTIONS]), functions[-QUESTIONS:]
        fixed = {f"width {width}": engine.fixed(width) for width in WIDTHS}
        self.engines = {"off": engine.plain(), **fixed, "auto": engine}

    def prompt(self, size: int, turn: int) -> list[int]:
        """`size` tokens: the functions that all turns begin with, as far as there is room, and its question."""
        alone = self.tokenize(user(self.before))
        ids = self.tokenize(user(f"{self.before}\n\n{self.questions[turn % QUESTIONS]}"))
        shared = next(n for n, (one, other) in enumerate(zip(alone, ids, strict=False)) if one != other)
        question = ids[shared:]
        if not len(question) < size <= len(ids):
            raise typer.BadParameter(f"--contexts {size}: give {len(question) + 1} to {len(ids)}, what HumanEval has")
        return ids[: size - len(question)] + question

    def round(self, size: int, turn: int) -> dict[str, Decoded]:
        """Each way on one prompt; all must give the same tokens."""
        prompt = self.prompt(size, turn)
        streams = {way: engine.stream([prompt], [self.params]) for way, engine in self.engines.items()}
        first = {way: len(next(stream).token_ids) for way, stream in streams.items()}
        seconds = in_turns(streams, turn)
        answers = {way: stream.outputs()[0] for way, stream in streams.items()}
        assert len({tuple(answer.token_ids) for answer in answers.values()}) == 1, "widths changed the answer"
        return {way: decoded(answers[way], first[way], seconds[way]) for way in streams}


def stretched(folder: Path, positions: int) -> Path:
    """SmolLM2 in `folder`, its files linked, its longest context no less than `positions`."""
    for file in target_folder("smollm2").iterdir():
        (folder / file.name).symlink_to(file.resolve())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = max(positions, config["max_position_embeddings"])
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def decoded(answer: RequestOutput, first: int, seconds: float) -> Decoded:
    """What came behind the answer's `first` tokens in so many seconds."""
    behind, statistics = len(answer.token_ids) - first, total([answer.statistics])
    steps = behind / (statistics.tokens_per_step or 1.0)
    return Decoded(behind / seconds, 1e3 * seconds / steps, statistics.acceptance_length)


def summary(rounds: list[dict[str, Decoded]]) -> dict[str, Any]:
    """Medians, and auto beside the best of the rest, round by round."""
    ways = {way: [measured[way] for measured in rounds] for way in rounds[0]}
    speed = {way: median(each.tokens_per_second for each in values) for way, values in ways.items()}
    fixed = {way: figure for way, figure in speed.items() if way != "auto"}
    best = max(fixed, key=lambda way: fixed[way])
    return {
        "tokens_per_second": speed,
        "all_rounds": {way: [each.tokens_per_second for each in values] for way, values in ways.items()},
        "milliseconds_per_step": {
            way: median(each.milliseconds_per_step for each in values) for way, values in ways.items()
        },
        "acceptance_length": median(measured["width 8"].acceptance_length or 1.0 for measured in rounds),
        "best": best,
        "auto_over_best": median(m["auto"].tokens_per_second / m[best].tokens_per_second for m in rounds),
    }


def show(results: list[dict[str, Any]]) -> None:
    """A table: tokens per second, and milliseconds a step."""
    ways = list(results[0]["tokens_per_second"])
    table = Table("context", *ways, "τ", "auto / best", title="tokens/s (ms a step), behind the first token")
    for row in results:
        figures = (f"{row['tokens_per_second'][way]:.1f} ({row['milliseconds_per_step'][way]:.0f})" for way in ways)
        best = f"{row['auto_over_best']:.3f} ({row['best']})"
        table.add_row(str(row["context"]), *figures, f"{row['acceptance_length']:.2f}", best)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
