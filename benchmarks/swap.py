"""Replaces the drafter of the embedded server under load, and back: answers against plain decoding, speed, seconds.

    python -m benchmarks.swap [--drafter FOLDER] [--users 8] [--seconds 60] [--output FILE]

`users` clients ask word problems greedily, one after the other, in three spans of `seconds`: with the first drafter,
after the exchange, and after the exchange back. Every answer is compared, token for token, with the one of the target
without speculation in this process. The second drafter is the bundled one in INT8, unless a folder is given.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.turns import write_report
from dflash_serve import LLM
from dflash_serve.adapter.launch import running_server
from dflash_serve.adapter.registry import server_backend
from dflash_serve.adapting.swap import INFO, SwappableServer
from dflash_serve.checkpoint.source import drafter_folder
from dflash_serve.client.endpoint import Endpoint
from dflash_serve.common.http import Connection
from dflash_serve.deployment.description import Deployment
from dflash_serve.speculation.params import SamplingParams
from tests.support.prompts import Messages, word_problems
from tests.support.quantised_smollm2 import write_smollm2

PROMPTS = 20


@dataclass
class Clients:
    """Clients of one server, and what they saw."""

    endpoint: Endpoint
    prompts: list[Messages]
    truth: list[list[int]]
    max_tokens: int
    stopped: bool = False
    times: list[float] = field(default_factory=list)  # when each answer was whole
    wrong: int = 0

    def ask(self, first: int) -> None:
        """Asks one prompt after the other, until the clients are stopped."""
        for number in takewhile(lambda _: not self.stopped, count(first)):
            which = number % len(self.prompts)
            reply = self.endpoint.complete(self.prompts[which], greedy(self.max_tokens))
            self.wrong += list(reply.token_ids or ()) != self.truth[which]
            self.times.append(monotonic())

    def during(self, span: Callable[[], None]) -> float:
        """Tokens per second of the answers that became whole while `span` ran."""
        before, start = len(self.times), monotonic()
        span()
        return (len(self.times) - before) * self.max_tokens / (monotonic() - start)


def main(
    drafter: Annotated[Path | None, typer.Option(help="Folder of the second drafter of SmolLM2.")] = None,
    users: Annotated[int, typer.Option(help="Clients at once.")] = 8,
    seconds: Annotated[float, typer.Option(help="Seconds of each of the three spans.")] = 60.0,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    output: Annotated[Path | None, typer.Option(help="File for the JSON.")] = None,
) -> None:
    """Measure an exchange and the one back."""
    prompts = word_problems(PROMPTS)
    truth = plain(prompts, max_tokens)
    with TemporaryDirectory() as name:
        folder = Path(name)
        first = copytree(drafter_folder("smollm2"), folder / "drafters/first")
        second = folder / "drafters/second"
        copytree(drafter or write_smollm2(folder / "published", "int8"), second)
        deployment = Deployment.model_validate(
            {
                "target": {"model": "smollm2"},
                "drafter": {"model": str(first)},
                "hardware": {"gpu": "none", "dtype": "float32"},
                "limits": {"max_batch_size": users, "max_model_len": 1024},
                "engine_args": {"torch": {"swap-from": str(folder / "drafters")}},
            }
        )
        with running_server(server_backend("torch"), deployment, folder / "server") as url:
            found = exchanged(Clients(Endpoint(url), prompts, truth, max_tokens), users, seconds, str(second))
            found["drafters"] = Connection(url).json("GET", INFO)["drafters"]
    Console().print_json(data=found)
    write_report({"users": users, "seconds": seconds, "max_tokens": max_tokens}, [found], output)


def greedy(max_tokens: int) -> SamplingParams:
    """Answers of exactly so many tokens."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def plain(prompts: list[Messages], max_tokens: int) -> list[list[int]]:
    """Answers of the target without speculation."""
    llm = LLM("smollm2", None, dtype="float32", max_model_len=1024, max_batch_size=8)
    return [list(one.token_ids) for one in llm.generate(prompts, greedy(max_tokens))]


def exchanged(clients: Clients, users: int, seconds: float, second: str) -> dict[str, Any]:
    """Exchanges the drafter and takes it back while the clients ask; the counts and seconds of both."""
    server, exchanges, speeds = SwappableServer(clients.endpoint), list[dict[str, Any]](), list[float]()
    with ThreadPoolExecutor(users) as pool:
        asking = [pool.submit(clients.ask, PROMPTS * user // users) for user in range(users)]
        try:
            for drafter in (second, None):
                speeds.append(clients.during(lambda: sleep(seconds)))
                start = monotonic()
                exchanges.append(server.update(drafter) | {"request_seconds": monotonic() - start})
            speeds.append(clients.during(lambda: sleep(seconds)))
        finally:
            clients.stopped = True
    for one in asking:
        one.result()  # raises what a client met
    answers = {"answers": len(clients.times), "wrong": clients.wrong}
    return {**answers, "tokens_per_second": speeds, "exchanges": exchanges}


if __name__ == "__main__":
    typer.run(main)
