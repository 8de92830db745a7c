"""Tokens per second of the real SGLang server on a CPU: off, SGLang's own fixed DFLASH, fixed widths and auto.

    OMP_WAIT_POLICY=PASSIVE .venv-sglang/bin/python -m benchmarks.sglang [--widths off,8,4,auto] [--streams 1,2,4,8,16]

In the environment of `make .venv-sglang/ready`, on a machine that does nothing else. All servers are up at once (3 GB
each; they start one after another) and take the same prompts in turns, round after round, so a busy spell slows all
alike; figures are medians over rounds. Every answer has `--tokens` tokens (greedy, the end of sequence ignored). Beside
the speeds stands where the time of a step went, by the server's own counters (SGLang's own steps, whole blocks, are one
part).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.decoding import measured_on, write_report
from dflash_serve.common.provenance import versions
from dflash_serve.deployment import Deployment
from dflash_serve.models.loader import load_tokenizer
from dflash_sglang.facts import PARTS, STEPS
from tests.support.prompts import word_problems
from tests.support.sglang_server import OnCpu, Server, fleet, smollm2

ROUND = {1: 4, 2: 6, 4: 12, 8: 16, 16: 24}
"""Requests of a round, by streams."""
Ids = list[int]


def main(
    widths: Annotated[str, typer.Option(help="Servers, comma-separated: off, widths, auto; 8 is SGLang's own.")] = (
        "off,8,4,2,auto"
    ),
    streams: Annotated[str, typer.Option(help="Streams at once, comma-separated.")] = "1,2,4,8,16",
    tokens: Annotated[int, typer.Option(help="Tokens of every answer.")] = 48,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; the median counts.")] = 5,
    output: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    """Measure all servers side by side."""
    names, loads = widths.split(","), [int(number) for number in streams.split(",")]
    tokenizer = load_tokenizer("smollm2")
    prompts = [
        list(tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=True)["input_ids"])
        for one in word_problems(20)
    ]
    wanted = {name: (smollm2(int(name) if name.isdecimal() else name), OnCpu()) for name in names}
    with ExitStack() as stack:
        servers = {name: started(stack, name, *how) for name, how in wanted.items()}
        for server in servers.values():
            server.tokens(prompts[:8], tokens, streams=4)  # warm-up, not counted
        results = [measure(servers, prompts, load, tokens, rounds) for load in loads]
    report = {
        "environment": measured_on(),
        "versions": versions("sglang", "torch", "transformers", "dflash-serve"),
        "load": {"target": "smollm2", "drafter": "smollm2", "dtype": "float32", "tokens": tokens, "rounds": rounds},
        "results": results,
    }
    show(report)
    write_report(report, output)


def started(stack: ExitStack, name: str, deployment: Deployment, backend: OnCpu) -> Server:
    """A server that came up beside idle ones alone: it measures what its steps cost."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    return stack.enter_context(fleet(folder, {name: (deployment, backend)}))[name].ready.result()


def measure(
    servers: Mapping[str, Server], prompts: list[Ids], streams: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """All servers in turns at one number of streams."""
    speeds: dict[str, list[float]] = {name: [] for name in servers}
    before = {name: parts(server) for name, server in servers.items()}
    for turn in range(rounds):
        asked = [prompts[(turn * 7 + i) % len(prompts)] for i in range(ROUND.get(streams, 2 * streams))]
        for name in list(servers) if turn % 2 else list(servers)[::-1]:
            start = time.perf_counter()
            answers = servers[name].tokens(asked, tokens, streams=streams)
            speeds[name].append(sum(map(len, answers)) / (time.perf_counter() - start))
    speed = {name: median(values) for name, values in speeds.items()}
    better = max((speed[name] for name in ("off", "8") if name in speed), default=None)
    return {
        "streams": streams,
        "tokens_per_second": speed,
        "all_rounds": speeds,
        "auto_over_better": speed["auto"] / better if better and "auto" in speed else None,
        "seconds_by_part": {name: spent(before[name], parts(server)) for name, server in servers.items()},
    }


def parts(server: Server) -> dict[str, float]:
    """The host's seconds so far by part of a step, and steps by width."""
    samples = server.samples
    widths = {f"steps at {width}": count for width, count in samples.by(f"{STEPS}_total", "width").items()}
    return {**{labels["part"]: value for labels, value in samples.named(f"{PARTS}_total")}, **widths}


def spent(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """What was added."""
    return {name: value - before.get(name, 0.0) for name, value in now.items() if value > before.get(name, 0.0)}


def show(report: dict[str, Any]) -> None:
    """A row for each number of streams, and below where auto's time went."""
    names = list(report["results"][0]["tokens_per_second"])
    table = Table(title="Tokens per second, SGLang's own server on a CPU, float32")
    for head in ("streams", *names, "auto / better of off and 8", "auto's steps"):
        table.add_column(head, justify="right")
    for row in report["results"]:
        ratio = row["auto_over_better"]
        spent_by_auto = row["seconds_by_part"].get("auto", {})
        steps = ", ".join(f"{name} {value:.2f}" for name, value in spent_by_auto.items())
        speeds = [f"{row['tokens_per_second'][name]:.1f}" for name in names]
        table.add_row(str(row["streams"]), *speeds, f"{ratio:.2f}" if ratio else "-", steps)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
